"""What a runner does for the other stages of a pipeline beside its model's streams: a step has a number by which its
streams are known, and tokens that the last stage samples come to the first.

For stages whose devices run ahead of their hosts. Where hosts compute, `runtime/executor/rank_steps.py` does this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.mesh import Mesh
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.steps_in_flight import SampledSteps

if TYPE_CHECKING:
    from quire.compute.collectives.card_links import CardLinks


class StageSteps(Protocol):
    """Is told of a runner's steps, in their order."""

    def column(self, plan: Plan) -> IntArray | None:
        """The column [1] by which other stages know the step's streams; None: there are no streams."""
        ...

    def begin(self, column: Tensor | None) -> None:
        """Begin a step whose model runs next, and whose column is on the device. Recorded with the step."""
        ...

    def await_tokens(self, plan: Plan, last: Tensor) -> None:
        """Wait before a step for sampled tokens that its rows read, and put them into `last` [slots] int64, the token
        that each slot sampled last."""
        ...

    def send_tokens(self, step: int, last: Tensor) -> None:
        """Send the tokens of a step that has sampled all of them."""
        ...


class WholeModel:
    """StageSteps where there are no other stages, or no device runs ahead."""

    def column(self, plan: Plan) -> IntArray | None:
        return None

    def begin(self, column: Tensor | None) -> None:
        return

    def await_tokens(self, plan: Plan, last: Tensor) -> None:
        return

    def send_tokens(self, step: int, last: Tensor) -> None:
        return


WHOLE_MODEL = WholeModel()


class LinkedSteps:
    """StageSteps of one stage of several.

    Args:
        links: To the others.
        mesh: This rank's place.
    """

    def __init__(self, links: CardLinks, mesh: Mesh) -> None:
        self._links = links
        self._mesh = mesh
        self._sampled = SampledSteps()
        self._taken = 0

    def column(self, plan: Plan) -> IntArray | None:
        return np.array([plan.step], dtype=np.int64)

    def begin(self, column: Tensor | None) -> None:
        assert column is not None
        self._links.begin(column)

    def await_tokens(self, plan: Plan, last: Tensor) -> None:
        if not self._mesh.is_first:
            return
        read = self._sampled.read_by(plan)
        self._sampled.sampled_by(plan)
        if read > self._taken or not plan.step:  # step 0 launches the kernel for the first time
            self._links.take_tokens(last, read)
            self._taken = read

    def send_tokens(self, step: int, last: Tensor) -> None:
        if self._mesh.is_last:
            self._links.send_tokens(last, step)
