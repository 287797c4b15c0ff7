"""The states of sequences, as layers see them that keep one state a sequence instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from quire.compute.attention.backend import AttentionBackend, OtherAttention
from quire.compute.kernels.reference.state_inputs import StateRows

StateOp = Callable[[StateRows], None]
"""An op that reads and writes the states of rows; it can be repeated, since it changes nothing else that it reads."""


class SequenceStates:
    """The states of all sequences, and which of them the rows of a step have.

    Args:
        tensors: Each layer's tensors [states, …], by the layer's number among those that this rank computes. State 0 is
            the dummy, which belongs to no sequence.
    """

    def __init__(self, tensors: Mapping[int, tuple[Tensor, ...]]) -> None:
        self._tensors = tensors
        self._rows: StateRows
        self._noted: list[StateOp] | None = None

    def begin(self, rows: StateRows, *, notes: bool = False) -> None:
        """Begin a step of these rows. With `notes`, `run_again` can repeat its ops."""
        self._rows, self._noted = rows, [] if notes else None

    def tensors_of(self, layer: int) -> tuple[Tensor, ...]:
        """Return the tensors of a layer, in the order of its `state_form`."""
        return self._tensors[layer]

    def run(self, op: StateOp) -> None:
        """Run an op that takes states through the step's rows. All ops that read or write states run here."""
        op(self._rows)
        if self._noted is not None:
            self._noted.append(op)

    def run_again(self, rows: StateRows) -> None:
        """Repeat all ops of the step with other rows and states. The ops' inputs are still those of the step."""
        assert self._noted is not None, "a step whose ops were not noted"
        for op in self._noted:
            op(rows)


class AttentionBesideStates(OtherAttention):
    """An AttentionBackend of a model some of whose layers keep states.

    Args:
        attention: The backend of the layers with attention.

    Attributes:
        states: The states of the other layers.
    """

    def __init__(self, attention: AttentionBackend, states: SequenceStates) -> None:
        super().__init__(attention)
        self.states = states


def states_of(backend: AttentionBackend) -> SequenceStates:
    """Return the states beside a backend, which a model with states is given."""
    assert isinstance(backend, AttentionBesideStates), "this model keeps states"
    return backend.states
