"""Sends sampled tokens from a pipeline's last stage to the first, and numbers each step's streams, on devices that run
ahead of their hosts.

On a CPU, `runtime/executor/cpu_rank.py` does this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quire.compute.mesh import Mesh
from quire.foundation.messages.workers import Plan
from quire.runtime.worker.async_scheduling import SampledSteps

if TYPE_CHECKING:
    from quire.compute.collectives.card_stage_links import CardStageLinks


class StageTokens:
    """Coordinates the steps of this rank's stage with the other stages. It must be told of every step, in order."""

    def __init__(self, links: CardStageLinks, mesh: Mesh) -> None:
        self._links = links
        self._mesh = mesh
        self._sampled = SampledSteps()
        self._taken = 0

    def begin(self, column: Tensor | None) -> None:
        """Begin the step whose model runs next. A captured graph includes this call."""
        assert column is not None, "the step has no column"
        self._links.begin(column)

    def await_tokens(self, plan: Plan, last: Tensor) -> None:
        """Wait for the sampled tokens that the plan's rows read, and write them to `last` [slots] int64, the token that
        each slot sampled last."""
        if not self._mesh.is_first:
            return
        read = self._sampled.read_by(plan)
        self._sampled.sampled_by(plan)
        if read > self._taken or not plan.step:  # step 0 launches the kernel for the first time
            self._links.take_tokens(last, read)
            self._taken = read

    def send_tokens(self, step: int, last: Tensor) -> None:
        """Send a step's sampled tokens to the first stage. Step 0 launches the kernel for the first time."""
        if self._mesh.is_last:
            self._links.send_tokens(last, step)
