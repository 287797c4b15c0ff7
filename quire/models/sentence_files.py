"""Reads the files of sentence-transformers that say how a model makes vectors of texts, in all their published forms.

Versions before 5.4 write `pooling_mode_*` booleans and modules as `sentence_transformers.models.Pooling`; later ones
write `pooling_mode`, a name or a list, and modules by the paths of their classes. What is unknown is refused by name.
Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quire.errors import CheckpointError

Mode = Literal["cls", "last", "mean", "mean_sqrt_len", "max", "weighted_mean"]
"""How one vector is made of a text's states: the first or last token's, their mean, their sum divided by the root of
their number, their maxima, or their mean weighted by positions from 1 on (Muennighoff 2022, SGPT)."""
_MODES: dict[str, Mode] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
"""Modes by their names in `pooling_mode`."""
_OLD_MODES: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""Modes by their older keys, in the order in which their vectors are put side by side."""
_ACTIVATIONS = {
    "Identity": "",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""Activations by the names of torch's classes."""
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_WITHOUT_KEYS = (*_TRANSFORMERS, "Normalize")
"""Modules whose folders may have no config.json."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class DenseModule:
    """A product of vectors, an activation, and maybe the vectors themselves added.

    Attributes:
        folder: The folder of its weights in the model's directory.
        activation: Empty: none.
        residual: Whether the inputs are added, through a product of their own if the widths differ.
        of_tokens: Whether it reads the states of tokens, before they are pooled.
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool = False
    of_tokens: bool = False


@dataclass(frozen=True)
class NormModule:
    """A layer norm of vectors, with torch's epsilon."""

    folder: str
    width: int


@dataclass(frozen=True)
class NormalizeModule:
    """Divides vectors by their lengths."""


@dataclass(frozen=True)
class TokenValues:
    """How the values of a text's tokens become one vector of the text (Formal et al. 2021, SPLADE).

    Attributes:
        reduce: What is taken of the values of all tokens.
        logs: How often a value v becomes log(1 + max(v, 0)) before.
    """

    reduce: Literal["max", "sum", "mean"]
    logs: int = 0


VectorModule = DenseModule | NormModule | NormalizeModule


@dataclass(frozen=True)
class SentenceFiles:
    """What sentence-transformers' files say.

    Attributes:
        modes: Pooling modes, whose vectors are put side by side; empty: nothing is pooled.
        include_prompt: Whether a prompt's tokens are pooled.
        modules: What comes behind pooling.
        token_values: How the logits of masked tokens become a vector; None: they do not.
        score_tokens: For a reranker, the token of "yes" and maybe that of "no", whose logits make the score.
        prompts, default_prompt, similarity: See PoolingInfo.
        truncate_dim: Length to which vectors are cut; 0: their own.
        max_len: Longest text in tokens; 0: as long as the model.
        lowercases: Whether texts are lower-cased first.
    """

    modes: tuple[Mode, ...] = ()
    include_prompt: bool = True
    modules: tuple[VectorModule, ...] = ()
    token_values: TokenValues | None = None
    score_tokens: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    similarity: str = "cosine"
    truncate_dim: int = 0
    max_len: int = 0
    lowercases: bool = False


def read_sentence_files(directory: Path) -> SentenceFiles | None:
    """Read the files in a model's directory; None if there is no modules.json.

    Raises:
        CheckpointError: A file is broken, or has a module or key that is not served; the message names it.
    """
    if not (directory / "modules.json").is_file():
        return None
    modes: tuple[Mode, ...] = ()
    include_prompt, modules, scores, values = True, list[VectorModule](), tuple[int, ...](), None
    for number, (kind, folder) in enumerate(_modules(directory)):
        own = _Keys.of(directory / folder / "config.json", optional=kind in _WITHOUT_KEYS)
        if kind in _TRANSFORMERS:
            _check_transformer(directory, folder, number)
        elif kind == "Pooling":
            if modes:
                raise own.refused("modules.json", "there are two Pooling modules")
            modes, include_prompt = _pooling(own)
        elif kind == "SpladePooling":
            values = _splade(own)
        elif kind == "LogitScore":
            scores = tuple(own.count(key) for key in ("true_token_id", "false_token_id") if own.get(key) is not None)
        else:
            modules.append(_MODULES[kind](own, folder))
    of_all = _Keys.of(directory / "config_sentence_transformers.json", optional=True)
    of_text = _Keys.of(directory / "sentence_bert_config.json", optional=True)
    if "message" in (of_text.get("modality_config") or ()):
        raise of_text.refused(
            "modality_config",
            "its 'message' puts every text into the chat template, which is not supported: take it out, and send "
            "`messages` where the template is wanted",
        )
    return SentenceFiles(
        modes=modes,
        include_prompt=include_prompt,
        modules=tuple(modules),
        token_values=values,
        score_tokens=scores,
        prompts=_prompts(of_all),
        default_prompt=str(of_all.get("default_prompt_name") or ""),
        similarity=of_all.choice("similarity_fn_name", SIMILARITIES, "cosine" if values is None else "dot"),
        truncate_dim=of_all.count("truncate_dim", 0),
        max_len=of_text.count("max_seq_length", 0),
        lowercases=of_text.flag("do_lower_case", default=False),
    )


class _Keys:
    """The keys of one file."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self._file = file
        self._values = values

    @classmethod
    def of(cls, file: Path, *, optional: bool) -> _Keys:
        return cls(file, {} if optional and not file.is_file() else _object(file))

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def refused(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {why}.", param=key)

    def wrong(self, key: str, why: str) -> CheckpointError:
        return self.refused(key, f"'{key}' is {self._values.get(key)!r}, it {why}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value < 2**31:
            raise self.wrong(key, "must be a whole number")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self._values.get(key) or default
        if value not in choices:
            raise self.wrong(key, f"is not supported: served are {', '.join(choices)}")
        return str(value)

    def known(self, *keys: str) -> None:
        """Refuse other keys than these, which might change the arithmetic."""
        unknown = sorted(set(self._values) - set(keys))
        if unknown:
            raise self.refused(unknown[0], f"the key '{unknown[0]}' is not supported")


def _object(file: Path) -> dict[str, Any]:
    found = _json(file)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object: download it again.")
    return found


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing, which modules.json asks for: download the model again.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}): download it again.") from None


def _modules(directory: Path) -> list[tuple[str, str]]:
    """Return the name of each module's class and its folder, in order."""
    file = directory / "modules.json"
    found = _json(file)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise CheckpointError(f"{file} holds no list of JSON objects: download it again.")
    modules = []
    for each in sorted(found, key=lambda module: int(module.get("idx", 0))):
        path, folder = str(each.get("type", "")), str(each.get("path", ""))
        package, _, name = path.rpartition(".")
        served = name in _SERVED
        if package.partition(".")[0] != "sentence_transformers" or not served:
            raise CheckpointError(
                f"{file}: the module {path} is not supported: served are {', '.join(_SERVED)}.",
                param="modules.json",
            )
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise CheckpointError(f"{file}: the folder {folder!r} is outside of the model's directory.")
        modules.append((name, folder))
    return modules


def _check_transformer(directory: Path, folder: str, number: int) -> None:
    if number:
        raise CheckpointError(f"{directory / 'modules.json'}: the Transformer is not the first module.")
    if folder and (directory / folder).resolve() != directory.resolve():
        raise CheckpointError(
            f"{directory / 'modules.json'}: the model itself is in the folder {folder!r}: give this folder as --model, "
            "and --pooler-config."
        )


def _pooling(keys: _Keys) -> tuple[tuple[Mode, ...], bool]:
    sizes = ("embedding_dimension", "word_embedding_dimension")
    keys.known(*sizes, "pooling_mode", "include_prompt", *_OLD_MODES)
    include_prompt, named = keys.flag("include_prompt", default=True), keys.get("pooling_mode")
    if named is None:
        old = tuple(mode for key, mode in _OLD_MODES.items() if keys.flag(key, default=False))
        if not old:
            raise keys.refused("pooling_mode", "it names no pooling mode: give --pooler-config")
        return old, include_prompt
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names or not all(name in _MODES for name in names):
        raise keys.wrong("pooling_mode", f"is not supported: served are {', '.join(_MODES)}, and lists of them")
    return tuple(_MODES[name] for name in names), include_prompt


def _splade(keys: _Keys) -> TokenValues:
    keys.known("pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension")
    reduce: Literal["max", "sum"] = "sum" if keys.choice("pooling_strategy", ("max", "sum"), "max") == "sum" else "max"
    activation = keys.choice("activation_function", ("relu", "log1p_relu"), "relu")
    return TokenValues(reduce, 2 if activation == "log1p_relu" else 1)


def _prompts(keys: _Keys) -> dict[str, str]:
    prompts = keys.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise keys.wrong("prompts", "must have texts by their names")
    default = keys.get("default_prompt_name")
    if default and default not in prompts:
        raise keys.wrong("default_prompt_name", "names none of the prompts")
    return dict(prompts)


def _dense(keys: _Keys, folder: str) -> DenseModule:
    keys.known(
        "in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
        "use_residual",
    )  # fmt: skip
    source, target = _ends(keys)
    if source != target:
        raise keys.wrong("module_output_name", "must be module_input_name")
    path = str(keys.get("activation_function") or "torch.nn.modules.activation.Tanh")
    package, _, name = path.rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS:
        raise keys.wrong("activation_function", f"is not supported: served are torch.nn's {', '.join(_ACTIVATIONS)}")
    return DenseModule(
        folder,
        keys.count("in_features"),
        keys.count("out_features"),
        keys.flag("bias", default=True),
        _ACTIVATIONS[name],
        keys.flag("use_residual", default=False),
        source == "token_embeddings",
    )


def _norm(keys: _Keys, folder: str) -> NormModule:
    keys.known("dimension")
    return NormModule(folder, keys.count("dimension"))


def _normalize(keys: _Keys, folder: str) -> NormalizeModule:
    keys.known("module_input_name", "module_output_name")
    if _ends(keys) != ("sentence_embedding", "sentence_embedding"):
        raise keys.wrong("module_input_name", "is not supported: only whole texts' vectors are normalised")
    return NormalizeModule()


def _ends(keys: _Keys) -> tuple[str, str]:
    source = keys.choice("module_input_name", ("sentence_embedding", "token_embeddings"), "sentence_embedding")
    return source, str(keys.get("module_output_name") or source)


_MODULES: dict[str, Any] = {"Dense": _dense, "LayerNorm": _norm, "Normalize": _normalize}
"""Readers of the modules behind pooling, by the names of their classes."""
_SERVED = ("Transformer", "MLMTransformer", "Pooling", "SpladePooling", "LogitScore", *_MODULES)
