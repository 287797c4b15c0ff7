"""Which rows move in a step where a pipeline's stages each compute another step.

A row that decodes needs the token of its last step, which comes out of the last stage. So that no stage idles, the
steps that are in the stages at the same time have different rows: each has a share of those that decode.
"""

from __future__ import annotations

import numpy as np

from quire.scheduling.scheduler.lengths import IntArray, Lengths


class MicroBatches:
    """Lets rows take turns in as many steps as are computed at the same time (`stages`)."""

    def __init__(self, stages: int) -> None:
        self._stages = stages

    def take_turns(self, uncomputed: IntArray, index: IntArray, lengths: Lengths, step: int) -> None:
        """Let rows wait whose token is still in the stages, and those that decode beyond the step's share.

        Chunks of prompts need no token: they follow one another through the stages. A row whose token is known may move
        at once, so a few rows do not wait for turns that nobody else takes. Of the steps that are in the stages
        together, each row is in one at most, so every row moves once in as many steps.

        `uncomputed` are the tokens that each running request could compute, in queue order; they become 0 for those
        that wait.
        """
        if self._stages == 1:
            return
        last = lengths.last_step[index]
        in_stages = (last > step - self._stages) & (lengths.in_flight_tokens[index] > 0)
        uncomputed[in_stages] = 0
        decoding = uncomputed == 1
        turns_left = self._stages - len(np.unique(last[in_stages]))
        share = min(-(-len(index) // self._stages), -(-int(decoding.sum()) // turns_left))
        uncomputed[decoding & (np.cumsum(decoding) > share)] = 0

    def moved(self, index: IntArray, lengths: Lengths, step: int) -> None:
        """Record that these requests are in this step."""
        if self._stages > 1:
            lengths.last_step[index] = step
