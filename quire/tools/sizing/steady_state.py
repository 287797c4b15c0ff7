"""What clients see of a server that always has the same number of requests: arithmetic, without a simulation.

In each step every decoding row gains a token, and prompt tokens are computed as they come on average: output tokens and
prompt tokens flow at the ratio of their lengths. The scheduler's rule for chunks decides how many steps a prompt takes.
If chunks are too small for the flow, prompts pile up until their share of the backlog is as large as the flow, and a
prompt waits for the backlog.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.scheduling.scheduler.token_budget import BACKLOG_SHARE, SMALLEST_CHUNK, step_limit_ms
from quire.tools.simulation.deployment import Deployment, Processor

_ROUNDS = 5
"""Rounds of the fixed point. It moves by less than a percent after four."""


@dataclass(frozen=True)
class Traffic:
    """Mean tokens of a prompt and of an output. `most` are the tokens of the longest sequence; 0 if all are alike."""

    prompt: int
    output: int
    most: int = 0

    @property
    def length(self) -> int:
        return self.prompt + self.output

    @property
    def longest(self) -> int:
        return max(self.most, self.length)


@dataclass(frozen=True)
class SteadyState:
    """What each of `batch` requests at a time gets, and what all of them get together."""

    batch: int
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float
    requests_per_s: float


def steady_state(deployment: Deployment, batch: int, traffic: Traffic) -> SteadyState:
    """The state of a server in which each request that ends is followed by the next at once."""
    step, shares = deployment.step, deployment.shares
    host_ms = shares.request_ms + shares.server_ms
    alone_ms = deployment.prompt_ms(traffic.prompt)
    context = traffic.prompt + traffic.output / 2
    ttft, tpot = alone_ms, step.decode(1, context)
    for _ in range(_ROUNDS if batch > 1 else 0):
        decoding = batch * traffic.output * tpot / (traffic.output * tpot + ttft)
        rows = max(1, round(decoding))
        flow = max(1, round(decoding * traffic.prompt / traffic.output))  # tokens of prompts a step
        backlog, chunk = _backlog(deployment, rows, context, flow, traffic.prompt * batch)
        tpot = step.mixed(rows, context, flow, traffic.prompt // 2)
        waits = (backlog + traffic.prompt) / chunk if chunk <= flow else traffic.prompt / min(chunk, traffic.prompt)
        ttft = max(alone_ms, (waits + 0.5) * step.mixed(rows, context, min(chunk, traffic.prompt), traffic.prompt // 2))
    request_ms = host_ms + ttft + (traffic.output - 1) * tpot
    rate = 1e3 * batch / request_ms
    return SteadyState(batch, host_ms + ttft, tpot, rate * traffic.output, rate)


def _backlog(deployment: Deployment, rows: int, context: float, flow: int, most: int) -> tuple[int, int]:
    """Prompt tokens that wait when `flow` come in each step, of `most` that can, and tokens of chunks in a step."""
    cost = deployment.new_roofline()
    decode_ms = cost.step_ms(rows, round(rows * context))
    padded = not isinstance(deployment.device, Processor)

    def chunk(backlog: int) -> int:
        limit = step_limit_ms(cost, decode_ms, rows, backlog, padded=padded)
        return max(SMALLEST_CHUNK, math.floor((limit - decode_ms) / cost.token_ms(0)))

    share = min(most, math.ceil(flow / BACKLOG_SHARE) + 1)  # of which a step's share is the flow
    waiting = next((backlog for backlog in (0, share) if chunk(backlog) >= flow), most)
    return waiting, chunk(waiting)
