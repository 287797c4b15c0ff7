"""What one step may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.foundation.config.values import check_positive

PerformanceMode = Literal["balanced", "interactivity", "throughput"]
Policy = Literal["fcfs", "priority"]
PreemptionMode = Literal["recompute", "swap"]


MAX_QUEUE_TIME = 30.0
OVERLOAD_QUEUE_TIME = 1.0


@dataclass(frozen=True)
class SchedulerConfig:
    """Continuous batching."""

    max_num_seqs: int | None = None
    """Most sequences in one step. Default: 256, and 512 on a GPU of 60 GiB or more."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; longer prompts are read in chunks. Default: 512, and 8,192 on a GPU."""
    long_prefill_token_threshold: int = 0
    """Most tokens that one prompt moves forward by in a step; 0 for no such limit."""
    scheduling_policy: Policy = "fcfs"
    """Who goes first: by arrival, in turns of the API keys if there are several; or by the requests' priority (lower
    first; a level is worth a minute of waiting)."""
    performance_mode: PerformanceMode | None = None
    """What prompts may take of the time of sequences that stream beside them: a share that grows with the queue
    (balanced), what is all but free (interactivity), or all of it (throughput). Default: balanced; throughput in the
    class LLM, whose answers are read when all are there."""
    max_queued_requests: int | None = None
    """Most sequences that wait for room; a request beyond gets 429 and when to try again. Default: no such limit."""
    max_queued_tokens: int | None = None
    """Most tokens of sequences that wait for room, of their prompts and expected outputs; a request beyond gets 429 and
    when to try again. Default: as many as the engine works off within --max-queue-time."""
    max_queue_time: float | None = None
    """Seconds that requests wait at most when they are let in, as measured throughput tells; without
    --max-queued-tokens. Default: 30."""
    overload_queue_time: float | None = None
    """Seconds that requests wait at most when they are let in while more arrive than are answered: then the queue is
    kept short, and the others get 429 at once. A burst is let in up to --max-queue-time. Default: 1, or
    --max-queue-time where that is set."""
    preemption_mode: PreemptionMode | None = None
    """What happens to a sequence that has to make room. Default: whichever is estimated to cost less each time."""

    def __post_init__(self) -> None:
        check_positive(self, "max_queued_requests", "max_queued_tokens", "max_queue_time", "overload_queue_time")
