"""Runs steps of the dummy slot before the first plan: warm-up runs, and steps captured as CUDA graphs or recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product

import torch
from torch import Tensor

from quire.compute.kernels.cpu.recording import Sizes
from quire.foundation.messages.workers import Plan
from quire.models.lora.step_tiles import Adapted
from quire.runtime.worker.graph_shapes import GraphShape, GraphShapes, ShapeKind
from quire.runtime.worker.host_batch import HostBatch
from quire.runtime.worker.model_runner import ModelRunner
from quire.runtime.worker.replay import CudaGraphs, record_steps
from quire.runtime.worker.sampling.sampler import Deferred
from quire.runtime.worker.step import Step, StepKind


class StartingRunner(ModelRunner):
    """A ModelRunner with the methods that a worker's start needs."""

    def run_largest(self, deferred: Deferred = nullcontext) -> None:
        """Run the dummy steps that take the most memory: the largest step, and steps of one token per row, which may
        run kernels of their own. Kernels that only some requests need are launched inside `deferred`."""
        self.run_dummies(self._limits.fewest_rows(self._limits.tokens), deferred)
        for rows in sorted({1, self._limits.rows}):
            self.run_dummies([1] * rows, deferred)

    def capture_graphs(self, most: int, *, precompiled: bool = False) -> None:
        """Capture CUDA graphs of steps up to `most` tokens, then run a step one token larger, so that no request waits
        for work done at a first launch.

        Args:
            precompiled: Whether the kernels of these steps are compiled and loaded already, or are being compiled
                elsewhere. If so, only the largest step of each kind runs before its capture, for what Triton and torch
                do at a first launch.
        """
        limits, dummy = self._limits, self.slots.dummy
        graphs = self._replayable
        assert isinstance(graphs, CudaGraphs)
        shapes = GraphShapes(most, limits.rows, limits.tokens, limits.length, limits.sampled, graphs.short)
        ran: set[tuple[ShapeKind, Adapted]] = set()
        with torch.inference_mode():
            for shape, adapted in product(shapes.all(), self._kinds):
                host = HostBatch.of_dummy(dummy, [1 if shape.is_decode else 2]).padded_to(shape, dummy)
                step = self._stage_dummy(host, adapted, shape)
                assert not self._stager.overflowed
                if not precompiled or (shape.kind, adapted) not in ran or shape.is_short:
                    self._compute(step)
                else:
                    step.staged.copy_to_device()
                ran.add((shape.kind, adapted))
                graphs.capture(step, self._compute)
        graphs.shapes = shapes
        self.run_dummies(limits.fewest_rows(most + 1), sample=False)

    def record_steps(self) -> None:
        """Record small steps on a device that shares the host's memory, if Quire's own kernels compute all of them."""
        if self.runs_ahead:
            return

        def step(adapted: Adapted, sizes: Sizes) -> Callable[[], Tensor]:
            counts = [sizes.tokens - sizes.rows + 1, *[1] * (sizes.rows - 1)]
            host = HostBatch.of_dummy(self.slots.dummy, counts, sizes.sampled)
            return partial(self._compute, self._stage_dummy(host, adapted))

        with torch.inference_mode():
            recorded = record_steps(step, self._kinds, self._limits.rows, self._limits.sampled)
        if recorded is not None:
            self._replayable = recorded

    def run_dummies(self, counts: Sequence[int], deferred: Deferred = nullcontext, *, sample: bool = True) -> None:
        """Run a step whose rows all belong to the dummy slot.

        Args:
            counts: Number of tokens of each row.
            deferred: Context in which kernels that only some requests need are launched.
            sample: Whether to also run all sampling and log-probability kernels, for the maximum number of sampled
                positions and prompt positions.
        """
        rows, positions = self._limits.rows, self._prompt_logprobs.positions
        verified = 0 if self._verifier is None else self._limits.sampled
        with torch.inference_mode():
            self.slots.init_dummy()
            if self._stages is not None:
                self._stages.await_tokens(Plan.empty(), self.slots.last_token)
            host = HostBatch.of_dummy(self.slots.dummy, counts)
            for adapted in self._kinds:
                self._ring.await_device()  # nobody takes their results, and they may be more than buffers
                _, hidden = self._hidden(self._stage_dummy(host, adapted))
            if self._pooler is not None:
                self._pooler.warm_up(hidden, min(rows, len(hidden)))
            if sample and self._sampler is None:
                return
            logits = self._model.logits(hidden[: max(rows, positions, verified)].clone())
            if sample:
                if self._device_tokens is not None:
                    self._device_tokens.sampled(torch.full_like(self.slots.length[:1], self.slots.dummy))
                if self._verifier is not None:
                    self._verifier.warm_up(logits[:verified])
                if self._sampler is not None:
                    self._sampler.warm_up(logits[:rows], deferred, self._max_logprobs)
                self._prompt_logprobs.warm_up(logits[:positions], self._max_logprobs)

    def _stage_dummy(self, host: HostBatch, adapted: Adapted, shape: GraphShape | None = None) -> Step:
        step = Step(Plan.empty(), StepKind.SAMPLE, host, adapted=adapted, shape=shape)
        self._stager.stage_dummy(step)
        return step
