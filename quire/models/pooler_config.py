"""Decides how a model makes vectors and values of whole texts, and whether it generates text beside that.

Never guesses: how texts are pooled comes from sentence-transformers' files, from config.json's head for labels, or from
--pooler-config. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quire.errors import CheckpointError, ConfigError
from quire.foundation.config.model import ModelConfig
from quire.foundation.messages.from_engine import PoolingInfo
from quire.models.config_file import ConfigFile
from quire.models.pooler_flags import GivenPooling, is_natural
from quire.models.sentence_files import (
    DenseModule,
    Mode,
    NormalizeModule,
    SentenceFiles,
    TokenValues,
    VectorModule,
    read_sentence_files,
)
from quire.models.text_head_spec import PROBLEMS, TextHead
from quire.pooling_params import TOKEN_TASKS, PoolingParams, PoolingTask

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

Activation = Literal["", "sigmoid", "softmax"]
_OF_PROBLEMS: dict[str, Activation] = dict(zip(PROBLEMS, ("", "softmax", "sigmoid"), strict=True))
_CROSS_ENCODERS: dict[str, Activation] = {"Identity": "", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""Last functions of cross-encoders by the names of torch's classes."""
_HOW = (
    "the model's files do not say how its texts are pooled (there is no modules.json): give --pooler-config, such as "
    '\'{"pooling_type": "MEAN"}\''
)


@dataclass(frozen=True)
class PoolerSpec:
    """How a model makes vectors and values of texts.

    Attributes:
        tasks: What is served, the default first; empty: nothing.
        generates: Whether the model generates text as well.
        modes: How a vector is made of a text's states; several: their vectors lie side by side.
        modules: What makes the embedding of the pooled vector.
        normalizes: Whether vectors are divided by their lengths at last, unless a request says otherwise.
        dim: Length of embeddings; 0: there are none.
        labels: Names of the values of a head.
        activation: What makes probabilities of values; empty: nothing.
        activates: Whether it is applied, unless a request says otherwise.
        token_values: How a vector is made of the head's values of all tokens, in place of `modes`; None: it is not.
        vectors_of_head: Whether the vector of a token is the head's values of it.
        score_tokens: Tokens whose logits are the values, for models without a head of their own.
        is_difference: Whether the only value is the logit of the last of `score_tokens` less that of the first.
        logit_mean, logit_sigma: Values are (value - mean) / sigma before the activation.
        step_tag_id, returned_token_ids: See PoolingParams; None: all.
        files: What sentence-transformers' files say beside.
        dimensions, matryoshka: See PoolingInfo.
        reads_pairs: See PoolingInfo.
        max_len: Longest text in tokens; 0: as long as the model.
        source: Where it was found, for the report of the start.
    """

    tasks: tuple[PoolingTask, ...] = ()
    generates: bool = True
    modes: tuple[Mode, ...] = ()
    modules: tuple[VectorModule, ...] = ()
    normalizes: bool = True
    dim: int = 0
    labels: tuple[str, ...] = ()
    activation: Activation = ""
    activates: bool = True
    token_values: TokenValues | None = None
    vectors_of_head: bool = False
    score_tokens: tuple[int, ...] = ()
    is_difference: bool = False
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    files: SentenceFiles = field(default_factory=SentenceFiles)
    dimensions: tuple[int, ...] = ()
    matryoshka: bool = False
    reads_pairs: bool = False
    max_len: int = 0
    source: str = ""

    def info(self) -> PoolingInfo:
        """Return what clients have to know."""
        return PoolingInfo(
            tasks=list(self.tasks),
            generates=self.generates,
            dim=self.dim,
            dimensions=list(self.dimensions),
            matryoshka=self.matryoshka,
            labels=list(self.labels),
            reads_pairs=self.reads_pairs,
            prompts=dict(self.files.prompts),
            default_prompt=self.files.default_prompt,
            include_prompt=self.files.include_prompt,
            similarity=self.files.similarity,
            max_embed_len=self.max_len if self.generates else 0,
            lowercases=self.files.lowercases,
        )

    def reads_last_only(self, params: PoolingParams) -> bool:
        """Whether only the last token's state counts, so that what is cached of a text's beginning serves."""
        return params.task not in TOKEN_TASKS and self.modes == ("last",)


GENERATES_ONLY = PoolerSpec()


def with_pooler(spec: ModelSpec, directory: Path, model: ModelConfig) -> ModelSpec:
    """Return the spec with what --runner, --convert, --pooler-config and the model's files say about whole texts.

    Raises:
        CheckpointError: A file asks for something that is not served.
        ConfigError: The flags contradict each other or the model, or nothing says how texts are pooled.
    """
    given = GivenPooling.of(model.pooler_config)
    pooler = _found(spec, directory, model, given)
    runs_both = spec.generates and model.runner == "generate"
    if not pooler.tasks:
        if not spec.generates or model.runner == "pooling" or model.convert in ("embed", "classify"):
            raise ConfigError(f"{directory}: {_HOW}.", param="pooler_config")
        return spec
    if model.runner == "generate" and not spec.generates:
        raise ConfigError(
            f"--runner generate: {spec.architecture} generates no text, it makes vectors or values of texts: leave "
            "--runner out.",
            param="runner",
        )
    if given.task is not None and given.task not in pooler.tasks:
        raise ConfigError(
            f"--pooler-config: the model does not do the task {given.task}, it does {', '.join(pooler.tasks)}.",
            param="pooler_config",
        )
    tasks = pooler.tasks if given.task is None else tuple(dict.fromkeys((given.task, *pooler.tasks)))
    pooler = replace(pooler, generates=runs_both, tasks=tasks)
    if not runs_both and not pooler.score_tokens:  # no logits of tokens are needed
        spec = replace(spec, generates=False, tie_embeddings=True, untied=False)
    return replace(spec, pooler=pooler)


def _found(spec: ModelSpec, directory: Path, model: ModelConfig, given: GivenPooling) -> PoolerSpec:
    """Return what the files and --pooler-config say; without tasks if they say nothing."""
    files = read_sentence_files(directory) or SentenceFiles()
    config = ConfigFile(directory / "config.json")
    if model.convert != "embed":
        if spec.text_head is not None and spec.text_head.labels:
            return _of_head(spec.text_head, config, files, given, spec)
        if spec.generates and model.convert != "none" and (tokens := _score_tokens(config, files, directory)):
            return _of_tokens(tokens, config, files, given)
    if (values := given.token_values or files.token_values or _vllm_values(config)) is not None:
        return _splade(spec, values, files, given)
    modes = given.modes or files.modes
    if spec.text_head is not None and spec.text_head.embeds:
        return _of_token_vectors(spec.text_head, files, given)
    if (
        not (modes or given.tokens == "ALL")
        or model.convert == "classify"
        or (model.convert == "none" and spec.generates)
    ):
        return GENERATES_ONLY
    if spec.text_head is not None:
        raise ConfigError(f"{spec.architecture} has a head, and is no embedding model.", param="convert")
    return _embedder(spec, modes, config, files, given)


def _embedder(
    spec: ModelSpec, modes: tuple[Mode, ...], config: ConfigFile, files: SentenceFiles, given: GivenPooling
) -> PoolerSpec:
    normalizes = any(isinstance(module, NormalizeModule) for module in files.modules) or not files.modes
    modules = _without_last_normalize(files.modules)
    width = max(1, len(modes)) * spec.hidden
    of_tokens, dim = spec.hidden, width
    for module in modules:
        inputs = of_tokens if isinstance(module, DenseModule) and module.of_tokens else dim
        if isinstance(module, NormalizeModule):
            continue
        expected = module.inputs if isinstance(module, DenseModule) else module.width
        if inputs != expected:
            raise CheckpointError(
                f"{module.folder}/config.json: the module reads {expected} values, and gets {inputs}."
            )
        if isinstance(module, DenseModule):
            of_tokens = module.outputs if module.of_tokens else of_tokens
            dim = module.outputs if not module.of_tokens else max(1, len(modes)) * module.outputs
    lengths = config.get("matryoshka_dimensions")
    if lengths is not None and not (isinstance(lengths, list) and all(is_natural(each) for each in lengths)):
        raise config.wrong("matryoshka_dimensions", "must be a list of whole numbers")
    truncated = given.dimensions or files.truncate_dim
    tasks: tuple[PoolingTask, ...] = ("embed",) if modes else ()
    tasks += ("token_embed",) if len(modes) <= 1 else ()  # else modules read several vectors of a text
    return PoolerSpec(
        tasks=tasks,
        modes=modes,
        modules=modules,
        normalizes=normalizes if given.activates is None else given.activates,
        dim=min(dim, truncated or dim),
        files=files,
        dimensions=tuple(lengths or ()),
        matryoshka=bool(lengths) or config.flag("is_matryoshka") or bool(truncated),
        max_len=files.max_len,
        source="--pooler-config" if given.modes else "modules.json",
    )


def _vllm_values(config: ConfigFile) -> TokenValues | None:
    """Return how SPLADE pools if config.json names vLLM's architecture of it, as --hf-overrides lets it."""
    names = config.get("architectures")
    is_splade = isinstance(names, list) and "BertSpladeSparseEmbeddingModel" in names
    return TokenValues("max", 1) if is_splade else None


def _splade(spec: ModelSpec, values: TokenValues, files: SentenceFiles, given: GivenPooling) -> PoolerSpec:
    """Return an embedder whose vectors have a number for each token of the vocabulary."""
    head = spec.text_head
    if head is None or head.labels or head.embeds:
        raise ConfigError(f"{spec.architecture} has no logits of masked tokens, which SPLADE pools.", param="model")
    return PoolerSpec(
        tasks=("embed",),
        token_values=values,
        normalizes=any(isinstance(module, NormalizeModule) for module in files.modules) or bool(given.activates),
        dim=spec.vocab_size,
        files=replace(files, similarity=files.similarity if files.token_values else "dot"),
        max_len=files.max_len,
        source="modules.json" if files.token_values else "--pooler-config" if given.token_values else "config.json",
    )


def _of_token_vectors(head: TextHead, files: SentenceFiles, given: GivenPooling) -> PoolerSpec:
    """Return an embedder of tokens alone, whose vectors a head makes."""
    return PoolerSpec(
        tasks=("token_embed",),
        vectors_of_head=True,
        normalizes=True if given.activates is None else given.activates,
        dim=head.steps[-1].width,
        files=files,
        max_len=files.max_len,
        source="config.json",
    )


def _of_head(
    head: TextHead, config: ConfigFile, files: SentenceFiles, given: GivenPooling, spec: ModelSpec
) -> PoolerSpec:
    is_reward = spec.architecture.endswith("RewardModel")
    tasks: tuple[PoolingTask, ...] = ("token_classify",)
    if head.pooling != "all":
        tasks = ("classify", "score") if len(head.labels) == 1 else ("classify",)
        tasks += ("token_classify",) if head.pooling == "last" else ()
    modes: tuple[Mode, ...] = ()
    if head.pooling != "all" and head.pooling != "late":
        modes = given.modes or (head.pooling,)
    return PoolerSpec(
        tasks=tasks,
        modes=modes,
        token_values=TokenValues("mean") if head.pooling == "late" else None,
        labels=head.labels,
        activation="softmax" if is_reward and len(head.labels) > 1 else _activation(head, config),
        activates=not is_reward if given.activates is None else given.activates,
        logit_mean=given.logit_mean,
        logit_sigma=given.logit_sigma,
        step_tag_id=given.step_tag_id,
        returned_token_ids=given.returned_token_ids,
        files=files,
        reads_pairs=len(head.labels) == 1 and head.pooling != "all",
        max_len=files.max_len,
        source="config.json",
    )


def _of_tokens(tokens: tuple[int, ...], config: ConfigFile, files: SentenceFiles, given: GivenPooling) -> PoolerSpec:
    """Return a reranker whose score is made of the logits of one token, or of the two for no and yes."""
    plain = config.choice("method", ("from_2_way_softmax", "no_post_processing"), "from_2_way_softmax")
    is_difference = len(tokens) == 2 and (plain == "from_2_way_softmax" or bool(files.score_tokens))
    labels = ("LABEL_0",) if is_difference else tuple(f"LABEL_{number}" for number in range(len(tokens)))
    return PoolerSpec(
        tasks=("classify", "score") if len(labels) == 1 else ("classify",),
        modes=("last",),
        labels=labels,
        activation="sigmoid" if len(labels) == 1 else "softmax",
        activates=True if given.activates is None else given.activates,
        score_tokens=tokens,
        is_difference=is_difference,
        logit_mean=given.logit_mean,
        logit_sigma=given.logit_sigma,
        files=files,
        reads_pairs=len(labels) == 1,
        max_len=files.max_len,
        source="modules.json" if files.score_tokens else "classifier_from_token",
    )


def _score_tokens(config: ConfigFile, files: SentenceFiles, directory: Path) -> tuple[int, ...]:
    """Return the tokens of a reranker's values: that for no before that for yes, if it has both."""
    if files.score_tokens:
        return files.score_tokens[::-1]
    names = config.get("classifier_from_token")
    if names is None:
        return ()
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise config.wrong("classifier_from_token", "must be a list of tokens")
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, which has the tokens of classifier_from_token.")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    found = []
    for name in names:
        token = tokenizer.token_to_id(name)
        if token is None:
            raise config.wrong("classifier_from_token", f"has {name!r}, which is no token")
        found.append(token)
    return tuple(found)


def _activation(head: TextHead, config: ConfigFile) -> Activation:
    """Return what makes probabilities of a head's values, as transformers' and sentence-transformers' keys say."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        package, _, name = str(named).rpartition(".")
        if not package.startswith("torch.nn") or name not in _CROSS_ENCODERS:
            raise config.refused(
                "activation_fn", f"the function {named} is not supported: served are {', '.join(_CROSS_ENCODERS)}."
            )
        return _CROSS_ENCODERS[name]
    if len(head.labels) == 1 and head.problem != "regression":
        return "sigmoid"
    return _OF_PROBLEMS.get(head.problem, "softmax")


def _without_last_normalize(modules: tuple[VectorModule, ...]) -> tuple[VectorModule, ...]:
    return modules[:-1] if modules and isinstance(modules[-1], NormalizeModule) else modules
