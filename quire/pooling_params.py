"""What a request wants a model to make of its text as a whole: plain data, checked when built. Names and meanings are
vLLM's."""

from __future__ import annotations

import copy
from typing import Any, Literal

import msgspec

from quire.errors import RequestError, UnsupportedField
from quire.sampling_params import KnownNames, RequestOutputKind, SamplingParams
from quire.validation import boolean, integer, token_ids

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
"""`embed`: a vector for the text. `classify`: a value for each label. `score`: one value, for models with one label.
`token_embed`, `token_classify`: a vector, or a value for each label, for each token."""
TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "score", "token_embed", "token_classify")
TOKEN_TASKS: frozenset[PoolingTask] = frozenset(("token_embed", "token_classify"))
"""Tasks with a vector for each token."""
MAX_DIMENSIONS = 2**16
MAX_RETURNED_TOKEN_IDS = 1_024
NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=None, detokenize=False)
"""The sampling parameters of a pooled request, which samples nothing."""
_OLDER_NAMES = ("normalize", "softmax", "activation")
_NOT_SERVED = ("late_interaction_params", "extra_kwargs")


class PoolingParams(
    msgspec.Struct, metaclass=KnownNames, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a request wants of its text as a whole, in place of tokens.

    Attributes:
        task: What to make of the text; None: what the method or endpoint does, or else the model's first task.
        dimensions: Length of the vector, for models trained so that a vector's beginning is an embedding as well
            (Kusupati et al. 2022, Matryoshka Representation Learning). None: the model's own length.
        use_activation: Whether values pass through the model's last function: an embedding is normalised to length 1,
            labels' values become probabilities. None: as the model does.
        normalize, softmax, activation: Older names of `use_activation`.
        step_tag_id: Return the values of tokens with this id only (process reward models).
        returned_token_ids: Return the values of these labels, in this order.
        requires_token_ids: Has no effect; poolers know a text's tokens.
        skip_reading_prefix_cache: Compute the whole text, whatever is cached.
        late_interaction_params, extra_kwargs: Not supported.
        output_kind: Only FINAL_ONLY.

    Raises:
        RequestError: A value is out of its range; `param` names the field.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        self._use_newer_name()
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                boolean(name, getattr(self, name))
        if self.task is not None and self.task not in TASKS:
            raise RequestError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}.", param="task")
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, 1, MAX_DIMENSIONS)
        if self.step_tag_id is not None:
            integer("step_tag_id", self.step_tag_id, 0)
        if self.returned_token_ids is not None:
            token_ids("returned_token_ids", self.returned_token_ids, MAX_RETURNED_TOKEN_IDS)
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise RequestError("output_kind must be FINAL_ONLY: vectors come as a whole.", param="output_kind")
        for name in _NOT_SERVED:
            if getattr(self, name):
                raise UnsupportedField(name)

    def clone(self) -> PoolingParams:
        """A copy, which shares no list with this one."""
        return copy.deepcopy(self)

    @property
    def per_token(self) -> bool:
        """Whether each token has a vector."""
        return self.task in TOKEN_TASKS

    def _use_newer_name(self) -> None:
        for name in _OLDER_NAMES:
            value = getattr(self, name)
            if value is None:
                continue
            if self.use_activation not in (None, value):
                raise RequestError(f"{name} is an older name of use_activation: send one of them.", param=name)
            msgspec.structs.force_setattr(self, "use_activation", value)
            msgspec.structs.force_setattr(self, name, None)
