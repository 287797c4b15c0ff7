"""Runs a model on the meta device to see what its attention asks for, without weights or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from quire.models.fallback.classes import EAGER, EXPERTS, arguments_of, base_of, set_attention, set_experts
from quire.models.fallback.description import AttentionCall

PROBE = "quire_probe"
"""Name of the attention and mask functions that only note how they are called."""
_TOKENS = 24
_FAR = 16384
"""Positions up to which masks are compared with causal ones and windows."""
_HARMLESS = {
    *("dropout", "position_ids", "position_embeddings", "use_cache", "cache_position", "layer_idx", "is_causal"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "return_dict"),
    *("past_key_values", "past_key_value", "num_items_in_batch", "target_dtype", "query_length", "enable_gqa"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
"""Arguments of attention functions that change no result without dropout: they are None, say what is known anyway, or
belong to implementations that are not used."""
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class NotPaged(Exception):
    """The model cannot use a paged cache; the message says why."""


class Probe:
    """Notes the calls of a forward. Use `running` around it."""

    current: Probe | None = None

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.problem: str | None = None
        self._masks: dict[int, tuple[Tensor, int | None]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        Probe.current = self
        try:
            yield
        finally:
            Probe.current = None

    def note_mask(self, shape: tuple[int, ...], mask_function: Callable[..., Any]) -> Tensor:
        """Note a mask that the model asks for, and return a stand-in by which attention recognises it."""
        stand_in = torch.empty(shape, dtype=torch.bool, device="meta")
        try:
            window = window_of(mask_function)
        except Exception as error:
            self.fail(f"a mask that is neither causal nor a window ({error})")
            window = None
        self._masks[id(stand_in)] = (stand_in, window)
        return stand_in

    def note_call(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> None:
        for name, value in given.items():
            if value is not None and name not in _HARMLESS and name not in ("scaling", "softcap", "sliding_window"):
                self.fail(f"its attention has {name}")
        if given.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.fail("its attention is not causal")
        window = given.get("sliding_window")
        if mask is not None:
            known = self._masks.get(id(mask))
            if known is None:
                self.fail("its attention gets a mask of the model's own")
            elif window is not None and known[1] not in (None, window):
                self.fail(f"its mask has a window of {known[1]}, and its attention one of {window}")
            else:
                window = known[1]
        if q.shape[0] != 1 or q.dim() != 4 or k.shape[2] != q.shape[2]:
            self.fail(f"its attention is over {tuple(k.shape)} keys")
        scale = given.get("scaling")
        scale = float(k.shape[-1] ** -0.5 if scale is None else scale)
        sizes = q.shape[1], k.shape[1], k.shape[-1], v.shape[-1]
        self.calls.append(AttentionCall(*sizes, scale, window, given.get("softcap")))

    def fail(self, problem: str) -> None:
        self.problem = self.problem or problem


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return the window of a causal mask; None: tokens see all tokens before them.

    Raises:
        NotPaged: It is another mask.
    """
    keys, zero = torch.arange(_FAR), torch.zeros((), dtype=torch.int64)

    def seen(query: int) -> Tensor:
        mask = mask_function(zero, zero, torch.tensor(query), keys)
        return torch.as_tensor(mask).expand(_FAR)

    count = int(seen(_FAR - 1).sum())
    window = None if count == _FAR else count
    near = {0, 1, 2, 7, count - 1, count, count + 1, 2 * count, _FAR // 2}
    for query in sorted(each for each in near if 0 <= each < _FAR):
        expected = keys <= query
        if window is not None:
            expected &= keys > query - window
        if not torch.equal(seen(query).bool(), expected):
            raise NotPaged(f"as position {query} sees others")
    return window


def _probe_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    assert Probe.current is not None
    Probe.current.note_call(module, query, key, value, attention_mask, given)
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1])), None


def _probe_mask(*, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    assert Probe.current is not None
    return Probe.current.note_mask((batch_size, 1, q_length, kv_length), mask_function)


def find_calls(model: PreTrainedModel) -> tuple[AttentionCall, ...]:
    """Return the attention calls of a forward of a model on the meta device.

    Raises:
        NotPaged: The model computes anything across tokens that paged attention does not.
    """
    AttentionInterface.register(PROBE, _probe_attention)
    AttentionMaskInterface.register(PROBE, _probe_mask)
    base = base_of(model)
    if base is None:
        raise NotPaged("its head is not separate from its decoder")
    _check_modules(model)
    accepted = arguments_of(base)
    if "position_ids" not in accepted:
        raise NotPaged("it takes no positions")
    ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    inputs = {"input_ids": ids, "position_ids": positions}
    cache = _cache_of(model)
    with_cache = {"past_key_values": cache, "use_cache": True} if "past_key_values" in accepted else {}
    set_attention(model, PROBE)
    set_experts(model, "batched_mm")
    try:
        masked, plain = Probe(), Probe()
        with masked.running():
            _forward(base, inputs | with_cache)
        AttentionMaskInterface._global_mapping.pop(PROBE)
        with plain.running():
            _forward(base, inputs | {"use_cache": False})
    finally:
        set_attention(model, EAGER)
        set_experts(model, EXPERTS)
    problem = masked.problem or plain.problem or _state_in(cache)
    if problem:
        raise NotPaged(problem)
    if not masked.calls or len(masked.calls) != len(plain.calls):
        raise NotPaged("its attention does not go through the attention interface")
    _check_alike(masked.calls)
    return tuple(masked.calls)


def _cache_of(model: PreTrainedModel) -> DynamicCache:
    try:
        return DynamicCache(config=model.config)
    except Exception as error:
        raise NotPaged(f"transformers' own cache does not fit it ({type(error).__name__}: {error})") from error


def _forward(base: torch.nn.Module, inputs: dict[str, Any]) -> None:
    try:
        with torch.inference_mode():
            base(**inputs)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise NotPaged(f"a forward without values fails ({type(error).__name__}: {first})") from error


def _check_modules(model: PreTrainedModel) -> None:
    if getattr(model, "_is_stateful", False):
        raise NotPaged("it keeps recurrent states")
    tokens = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module is not tokens and module.padding_idx is not None:
            raise NotPaged("its positions depend on which tokens are padding")
        if isinstance(module, torch.nn.Conv1d) and module.kernel_size[0] > 1:
            raise NotPaged("it has convolutions over tokens")
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if any(each in str(kind) for each in _LENGTH_DEPENDENT):
                raise NotPaged(f"its rotation depends on a sequence's length ({kind})")


def _state_in(cache: Any) -> str | None:
    layers = [type(layer).__name__ for layer in cache.layers]
    other = [name for name in layers if name not in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")]
    return f"it keeps states beside keys and values ({other[0]})" if other else None


def _check_alike(calls: list[AttentionCall]) -> None:
    """Refuse layers whose heads do not fit one another in the cache."""
    most = max(call.kv_heads for call in calls)
    if len({call.heads for call in calls}) > 1 or any(most % call.kv_heads or call.heads % most for call in calls):
        raise NotPaged("its layers have different numbers of heads")
