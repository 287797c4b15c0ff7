"""Which two models are compared: resolved like a server's, alike but for their weights, small enough for the device."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from quire.errors import CheckpointError, ConfigError
from quire.foundation.config import Config, environment
from quire.models.spec import ModelSpec
from quire.planning.auto_config import ResolvedConfig, resolve
from quire.planning.footprint import format_bytes
from quire.planning.machine import this_machine
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.tools.quant_check.continuations import read_passages
from quire.tools.quant_check.options import CheckOptions

_MAY_DIFFER = ("quantization", "held", "dtype", "eos_ids", "bos_id", "max_model_len", "untied")
"""Fields of ModelSpec that do not change the arithmetic between tokens and logits."""

SHARE_FOR_WEIGHTS = 0.8
"""Of the device's memory. The rest is for activations and logits."""


@dataclass(frozen=True)
class BothModels:
    """The resolved settings of two models of one shape, dtype and device. `fit_at_once` tells whether the device has
    room for the weights of both. The tokenizer is the base model's; None if only token ids are compared."""

    base: ResolvedConfig
    quantized: ResolvedConfig
    fit_at_once: bool
    tokenizer: Tokenizer | None

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence in both models."""
        return min(self.base.spec.max_model_len, self.quantized.spec.max_model_len)


def resolve_both(options: CheckOptions, *, needs_text: bool) -> BothModels:
    """Find both models, check that they can be compared, and describe them on standard error. Raises ConfigError if
    they cannot, ModelNotFoundError or CheckpointError if one is not there or not supported, and MemoryBudgetError if
    the device has no room for one."""
    if options.base == options.quantized and options.quantization is None:
        raise ConfigError(
            "BASE and QUANT are the same model: give the quantized one, or --quantization fp8.", param="quantized"
        )
    settings: dict[str, Any] = {"device": options.device, "max_num_seqs": 1, "swap_space": 0, "enforce_eager": True}
    settings |= {"skip_tokenizer_init": not needs_text, "use_tqdm_on_load": False}
    first = environment.apply(Config().with_values(model=options.base, dtype=options.dtype, **settings))
    base = resolve(first)
    model = base.config.model
    settings |= {"tokenizer": model.tokenizer, "quantization": options.quantization, "dtype": model.dtype}
    quantized = resolve(environment.apply(Config().with_values(model=options.quantized, **settings)))
    _check_alike(base.spec, quantized.spec)
    tokenizer = load_tokenizer(str(model.tokenizer)) if needs_text else None
    if tokenizer is not None:
        _check_tokenizers(tokenizer, quantized.config.model.model)
    form = (reason for reason in quantized.reasons if reason.startswith("weights "))
    for reason in (*base.reasons[:3], quantized.reasons[0], *form):
        print(f"  {reason}", file=sys.stderr)
    return BothModels(base, quantized, _fit_at_once(base, quantized), tokenizer)


def _check_alike(base: ModelSpec, quantized: ModelSpec) -> None:
    """Refuse models that are not one model in two forms."""
    for each in fields(ModelSpec):
        ours, theirs = getattr(base, each.name), getattr(quantized, each.name)
        if each.name not in _MAY_DIFFER and ours != theirs:
            name, ours, theirs = _difference(each.name, ours, theirs)
            what = name.replace("_", " ")
            raise ConfigError(
                f"BASE and QUANT are different models: {what} is {ours} and {theirs}. Give the model that QUANT was "
                "made from.",
                param="quantized",
            )


def _difference(name: str, ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """The innermost field in which two values of a ModelSpec differ: its name behind its part's, and both values."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        if len(ours) != len(theirs):
            return f"number of {name}", len(ours), len(theirs)
        pairs = [(name, *pair) for pair in zip(ours, theirs, strict=True)]
    elif is_dataclass(ours) and type(ours) is type(theirs):
        part = name.split(" ")[-1]
        pairs = [(f"{part} {each.name}", getattr(ours, each.name), getattr(theirs, each.name)) for each in fields(ours)]
    else:
        return name, ours, theirs
    return next(_difference(*pair) for pair in pairs if pair[1] != pair[2])


def _fit_at_once(base: ResolvedConfig, quantized: ResolvedConfig) -> bool:
    """Whether the weights of both leave room in the device's memory; if not, says so on standard error."""
    dtype, machine = base.config.model.dtype, this_machine()
    on_gpu = base.config.device.device == "cuda" and machine.gpu is not None
    available = machine.gpu.free_bytes if on_gpu and machine.gpu else machine.memory_bytes
    needed = base.spec.weight_bytes(dtype) + quantized.spec.weight_bytes(dtype)
    if needed <= SHARE_FOR_WEIGHTS * available:
        return True
    print(
        f"  memory      {format_bytes(available)}: too little for the weights of both models ({format_bytes(needed)}), "
        "so each layer's are read whenever it computes",
        file=sys.stderr,
    )
    return False


def _check_tokenizers(tokenizer: Tokenizer, directory: str) -> None:
    """Refuse models whose tokens have different meanings."""
    try:
        other = load_tokenizer(directory)
    except CheckpointError:
        return  # it has none of its own
    if any(tokenizer.encode(text) != other.encode(text) for text in read_passages()):
        raise ConfigError(
            "BASE and QUANT have different vocabularies: their tokenizers make different tokens of the same text. Give "
            "the model that QUANT was made from.",
            param="quantized",
        )
