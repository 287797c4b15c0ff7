"""Finds out how transformers' class for a checkpoint can be served, without weights.

Run as a program by processes that do not import torch: prints a Description, or an error, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from quire.errors import CheckpointError
from quire.models.fallback.classes import build_text_on_meta, build_whole, find_class, read_config, text_config_of
from quire.models.fallback.description import AttentionCall, Description
from quire.models.fallback.halves import Halves
from quire.models.fallback.own_caches import cache_name
from quire.models.fallback.probe import NotPaged, find_calls

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "context_length", "n_ctx")
_SHORT, _LONG = 24, 48


def describe(directory: Path) -> Description:
    """Describe a checkpoint's model.

    Raises:
        CheckpointError: transformers cannot serve it either; the message says why.
    """
    config = read_config(directory)
    names = list(config.architectures or [])
    kind = find_class(config, names)
    if kind is None:
        return _describe_whole(directory, config, names)
    model = build_text_on_meta(kind, config, torch.float32)
    is_separate = _has_separate_head(model)
    calls: tuple[AttentionCall, ...] = ()
    reason = "all its attention is causal, and goes through transformers' attention interface"
    try:
        calls = find_calls(model)
        if not is_separate:
            raise NotPaged("its head cannot be computed alone")
    except NotPaged as error:
        calls, reason = (), str(error)
    text, tied = text_config_of(config), model.all_tied_weights_keys or {}
    layers = len(calls) or _first_number(text, ("num_hidden_layers", "decoder_layers", "n_layer", "num_layers")) or 1
    each, fixed = (0, 0) if calls else _cached_elements(model, is_separate, text, layers)
    vocab_size = _table_of(model).shape[0]
    return Description(
        directory=str(directory),
        architecture=kind.__name__,
        version=transformers.__version__,
        tier="paged" if calls else "own",
        reason=reason,
        calls=calls,
        is_separate=is_separate,
        hidden=_hidden_width(model) if is_separate else vocab_size,
        vocab_size=vocab_size,
        layers=layers,
        parameters=sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tied),
        tied=bool(tied),
        max_model_len=_first_number(text, _LENGTHS),
        bos_id=_first_number(text, ("bos_token_id",)),
        eos_ids=_ids(text.eos_token_id if hasattr(text, "eos_token_id") else None),
        token_elements=each,
        sequence_elements=fixed,
    )


def _describe_whole(directory: Path, config: Any, names: list[str]) -> Description:
    """Describe a model that makes vectors or values of whole texts."""
    model, head = build_whole(config, names, torch.float32)
    text, tied = text_config_of(config), model.all_tied_weights_keys or {}
    table: Any = model.get_input_embeddings()
    if not isinstance(table, torch.nn.Embedding):
        raise CheckpointError(f"{type(model).__name__} has no single table of tokens: give another model.")
    hidden = _first_number(text, ("hidden_size", "d_model", "dim", "n_embd")) or table.embedding_dim
    layers = _first_number(text, ("num_hidden_layers", "encoder_layers", "n_layers", "n_layer", "num_layers")) or 1
    longest = _first_number(text, _LENGTHS)
    return Description(
        directory=str(directory),
        architecture=type(model).__name__,
        version=transformers.__version__,
        tier="whole",
        reason="each text is computed whole, in one step",
        calls=(),
        is_separate=True,
        hidden=hidden,
        vocab_size=table.num_embeddings,
        layers=layers,
        parameters=sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tied),
        tied=True,
        max_model_len=None if longest is None else longest - _first_position(model),
        bos_id=_first_number(text, ("bos_token_id",)),
        eos_ids=_ids(getattr(text, "eos_token_id", None)),
        token_elements=2 * hidden * layers,
        values_of=head,
        token_types=_first_number(text, ("type_vocab_size",)) or 0,
    )


def _first_position(model: PreTrainedModel) -> int:
    """Return the number of the first position's embedding, which is over 0 where padding has one."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    rows = (table.padding_idx for table in tables if isinstance(table, torch.nn.Embedding))
    return next((row + 1 for row in rows if row is not None), 0)


def _hidden_width(model: PreTrainedModel) -> int:
    return _table_of(model).shape[1]


def _table_of(model: PreTrainedModel) -> Tensor:
    """Return the weight of the head, or else of the embedding: [vocabulary, hidden]."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    module: Any = head if isinstance(head, torch.nn.Linear) else model.get_input_embeddings()
    table = getattr(module, "weight", None)
    if not isinstance(table, Tensor) or table.dim() != 2:
        raise CheckpointError(
            f"{type(model).__name__} has no single table of tokens, so it generates no text: give another model."
        )
    return table


def _has_separate_head(model: PreTrainedModel) -> bool:
    halves = Halves(model)
    try:
        return halves.finds_head(_hidden_width(model))
    finally:
        halves.restore()


def _cached_elements(model: PreTrainedModel, is_separate: bool, text: Any, layers: int) -> tuple[int, int]:
    """Return how many elements a sequence's own cache gains with a token, and how many it has besides.

    They are measured without values. Where that fails, they are those of keys and values of all heads.
    """
    halves = Halves(model, is_separate)
    name = cache_name(halves)
    try:
        if name is None:
            return 1, 0  # it keeps the tokens
        short, long = (_elements_of(getattr(_run(halves, tokens), name)) for tokens in (_SHORT, _LONG))
        each = max(0, long - short) // (_LONG - _SHORT)
        return each, max(0, long - _LONG * each)
    except Exception:  # of what models do with values in a forward
        heads = _first_number(text, ("num_key_value_heads", "num_attention_heads", "decoder_attention_heads")) or 1
        width = _first_number(text, ("head_dim",)) or _hidden_width(model) // heads
        return 2 * layers * heads * int(width), 0
    finally:
        halves.restore()


def _run(halves: Halves, tokens: int) -> Any:
    with torch.inference_mode():
        ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
        return halves.hidden(ids, use_cache=True)[1]


def _elements_of(value: Any, seen: set[int] | None = None) -> int:
    """Return the number of elements of all tensors that an object holds."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.device)):
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.numel()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if hasattr(value, "__dict__") and not isinstance(value, type):
        inner = [*inner, *(each for key, each in vars(value).items() if key != "config")]
    return sum(_elements_of(each, seen) for each in inner)


def _first_number(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # of a config whose layers differ
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(each for each in values if isinstance(each, int) and each >= 0)


def answer(describe: Callable[[Path], Any]) -> None:
    """Print what a function finds of the directory that the first argument names, or its error."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        found: dict[str, Any] = {"description": msgspec.to_builtins(describe(Path(sys.argv[1])))}
    except CheckpointError as error:
        found = {"error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    answer(describe)
