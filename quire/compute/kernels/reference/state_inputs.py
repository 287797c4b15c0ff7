"""Named tuples of what ops take that keep one state a sequence, such as convolutions and linear attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class StateRows(NamedTuple):
    """The rows of a step, as ops that keep one state a sequence take them.

    State 0 is the dummy: rows of padding have it. It belongs to no sequence, and whatever is written there is not read.

    Attributes:
        states: [rows] int64, each row's state: an index into the first dimension of the state tensors, which are read
            and written in place. No state but the dummy is that of two rows.
        starts: [rows + 1] int64: row i's tokens are those from starts[i] to starts[i + 1]; there may be none.
    """

    states: Tensor
    starts: Tensor


def check_states(rows: StateRows, state: Tensor) -> None:
    """Refuse rows with states that are not among these [states, …].

    Raises:
        IndexError: A row has one.
    """
    if bool(((rows.states < 0) | (rows.states >= len(state))).any()):
        raise IndexError("The state of a row is none of the states that there are.")


def steps_of(rows: StateRows, state: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first tokens of all rows, their second tokens and so on: numbers of tokens and their rows' states.

    Raises:
        IndexError: A row's state is not among these [states, …].
    """
    check_states(rows, state)
    starts, counts = rows.starts[:-1], rows.starts.diff()
    for step in range(int(counts.max())):
        live = (counts > step).nonzero()[:, 0]
        yield starts[live] + step, rows.states[live]
