"""What a runner does for the other stages of a pipeline beside its model's streams, where devices run ahead of their
hosts: a step has a number by which its streams are known, and tokens that the last stage samples come to the first.

Where hosts compute, `runtime/executor/cpu_rank.py` does this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.compute.attention.metadata import IntArray
from quire.compute.mesh import Mesh
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.steps_in_flight import SampledSteps

if TYPE_CHECKING:
    from quire.compute.collectives.card_links import CardLinks


class StageSteps:
    """The steps of one stage of several; hears of all of them, in their order.

    Args:
        links: To the other stages.
        mesh: This rank's place.
    """

    def __init__(self, links: CardLinks, mesh: Mesh) -> None:
        self._links = links
        self._mesh = mesh
        self._sampled = SampledSteps()
        self._taken = 0

    def column(self, plan: Plan) -> IntArray:
        """The column [1] by which other stages know the step's streams."""
        return np.array([plan.step], dtype=np.int64)

    def begin(self, column: Tensor | None) -> None:
        """Begin a step whose model runs next, and whose column is on the device. Recorded with the step."""
        assert column is not None, "the step has no column"
        self._links.begin(column)

    def await_tokens(self, plan: Plan, last: Tensor) -> None:
        """Wait before a step for sampled tokens that its rows read, and put them into `last` [slots] int64, the token
        that each slot sampled last."""
        if not self._mesh.is_first:
            return
        read = self._sampled.read_by(plan)
        self._sampled.sampled_by(plan)
        if read > self._taken or not plan.step:  # step 0 launches the kernel for the first time
            self._links.take_tokens(last, read)
            self._taken = read

    def send_tokens(self, step: int, last: Tensor) -> None:
        """Send the tokens of a step that has sampled all of them; step 0 launches the kernel for the first time."""
        if self._mesh.is_last:
            self._links.send_tokens(last, step)
