"""A simulated load: times by arithmetic, the real scheduler's rules, the same every time."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.pooler_config import PoolerSpec
from quire.models.spec import read_spec
from quire.planning.costmodel.cards import card
from quire.tools.simulation import engine
from quire.tools.simulation.deployment import Deployment, deploy, with_drafts
from quire.tools.simulation.engine import SimulatedRun, simulate
from quire.tools.simulation.figures import figures
from quire.tools.simulation.trace import Trace, TraceRequest
from quire.tools.sizing.measured_rows import DIRECTORY

SPEC = read_spec(DIRECTORY / "qwen3-0.6b")


def deployed(**settings: object) -> Deployment:
    config = Config().with_values(**{"max_model_len": 4_096, "max_num_seqs": 64, **settings})
    return deploy(config, SPEC, card("h200"))


WHERE = deployed()


def run(*requests: TraceRequest, concurrency: int | None = None, where: Deployment = WHERE) -> SimulatedRun:
    return simulate(where.config, SPEC, where.simulated(server=False), Trace(requests, concurrency))


def test_a_single_request_takes_its_steps() -> None:
    (served,) = run(TraceRequest(5.0, 700, 4)).served
    assert served.sent == 5.0
    assert 1e3 * served.ttft == pytest.approx(WHERE.step.prompt(700) + WHERE.shares.request_ms)
    decodes = [WHERE.step.mixed(1, 700 + i, 0, 0) for i in range(3)]
    assert [1e3 * itl for itl in served.itls] == pytest.approx(decodes, rel=1e-6)
    assert served.tpot == pytest.approx(sum(served.itls) / 3)
    assert served.e2e_latency == pytest.approx(served.ttft + sum(served.itls))


def test_drafts_bring_as_many_tokens_as_are_said_to_be_accepted() -> None:
    """Steps of four tokens take about as long as those of one; a draft model's passes are added."""
    given = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    times = []
    for own in (None, {"method": "ngram"}, {"model": str(DIRECTORY / "qwen3-0.6b")}):
        asked = None if own is None else own | given
        config = Config().with_values(max_model_len=4_096, max_num_seqs=64, speculative_config=asked)
        config = with_drafts(config, SPEC, DIRECTORY / "qwen3-0.6b", card("h200"))
        where = deploy(config, SPEC, card("h200"))
        (served,) = run(TraceRequest(0.0, 100, 601), where=where).served
        assert len(served.times) == 601
        assert served.tpot is not None
        times.append(served.tpot)
    alone, looked_up, drafted = times
    assert alone / looked_up == pytest.approx(2.5, rel=0.1)
    assert drafted == pytest.approx(looked_up + 3 * alone / 2.5, rel=0.1)


def test_every_request_gets_its_tokens_in_order() -> None:
    found = run(*(TraceRequest(0.002 * i, 50 + 13 * i, 1 + i % 7) for i in range(100)))
    assert [len(each.times) for each in found.served] == [1 + i % 7 for i in range(100)]
    assert all(each.times == sorted(each.times) for each in found.served)
    assert 0 < found.busy <= 1


def test_prompts_wait_beside_streams_as_the_scheduler_says() -> None:
    """A prompt that comes amid 32 streams is cut into chunks, so that no stream stands still for all of it."""
    streams = [TraceRequest(0.0, 16, 400) for _ in range(32)]
    found = run(*streams, TraceRequest(0.2, 4_000, 2))
    late = found.served[-1]
    longest = max(gap for each in found.served[:32] for gap in each.itls[50:])
    alone = WHERE.step.prompt(4_000) / 1e3
    assert late.ttft > 2 * alone
    assert longest < alone


def test_a_shared_prefix_is_computed_once() -> None:
    shared = ("system", 512)
    first, second, other = run(
        TraceRequest(0.0, 600, 2, (shared,)), TraceRequest(1.0, 600, 2, (shared,)), TraceRequest(2.0, 600, 2)
    ).served
    assert (first.cached, second.cached, other.cached) == (0, 512, 0)
    assert second.ttft < first.ttft == pytest.approx(other.ttft)


def test_clients_that_wait_send_the_next_request_when_one_is_over() -> None:
    found = run(*(TraceRequest(0.0, 64, 8) for _ in range(12)), concurrency=4).served
    for each in found[4:]:
        before = [other for other in found if other.times[-1] <= each.sent]
        assert sum(other.sent <= each.sent < other.times[-1] for other in found) <= 4
        assert before


def test_too_little_memory_preempts() -> None:
    tight = deployed(num_gpu_blocks_override=64, max_model_len=1024, swap_space=0.0)
    found = figures(run(*(TraceRequest(0.0, 100, 200) for _ in range(8)), where=tight))
    assert found.preemptions > 0
    assert found.output_tokens == 1_600
    assert figures(run(*(TraceRequest(0.0, 100, 200) for _ in range(8)))).preemptions == 0


def test_blocks_that_no_request_reaches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has room for ten billion blocks beside a model of a few megabytes."""
    load = Trace(tuple(TraceRequest(0.001 * i, 300 + i, 200, (("system", 64 * (i % 3)),)) for i in range(30)))

    def served(blocks: int) -> SimulatedRun:
        device = WHERE.simulated(server=False)
        limits = msgspec.structs.replace(device.limits, num_blocks=blocks)
        return simulate(WHERE.config, SPEC, replace(device, limits=limits), load)

    huge = served(10**10)
    assert 0 < max(each.kv_share for each in huge.occupancy) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_blocks_in_use", lambda config, spec, limits, trace: limits.num_blocks)
        listed = served(20_000)
    fewer = served(20_000)
    assert huge.served == fewer.served == listed.served
    assert fewer.occupancy == listed.occupancy


def test_the_same_load_takes_the_same_time() -> None:
    load = [TraceRequest(0.001 * i, 100 + i, 20) for i in range(40)]
    assert [each.times for each in run(*load).served] == [each.times for each in run(*load).served]


def test_a_request_that_no_engine_takes_is_named() -> None:
    with pytest.raises(ConfigError, match="Request 2 of the trace"):
        run(TraceRequest(0.0, 10, 10), TraceRequest(0.0, 4_000, 200))


def test_limits_decide_what_is_good() -> None:
    found = run(TraceRequest(0.0, 100, 10), TraceRequest(1.0, 4_000, 10))
    fast, slow = (1e3 * each.ttft for each in found.served)
    limits = figures(found, {"ttft": (fast + slow) / 2})
    assert (limits.good, limits.goodput_share) == (1, 0.5)
    assert figures(found).good is None
    assert limits.milliseconds["ttft"][50] == pytest.approx((fast + slow) / 2)


def test_a_model_of_vectors_pools_every_prompt() -> None:
    """In chunks, like any prompt; what its requests would bring in tokens does not count."""
    spec = replace(SPEC, pooler=PoolerSpec(tasks=("embed",), generates=False, modes=("last",), dim=SPEC.hidden))
    requests = tuple(TraceRequest(0.0, length, 9) for length in (10, 3_000, 700))
    found = simulate(WHERE.config, spec, WHERE.simulated(server=False), Trace(requests, None))
    assert [len(each.times) for each in found.served] == [1, 1, 1]
    assert all(0 < each.ttft == each.e2e_latency for each in found.served)
    assert found.seconds < run(*requests).seconds
