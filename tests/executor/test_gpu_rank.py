"""A rank with a GPU: a CPU worker takes the GPU's place, and a list of messages that of the engine."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.compute.collectives.layout import LINE
from quire.compute.mesh import Mesh
from quire.errors import EngineDeadError
from quire.foundation.clock import SystemClock
from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded, DeviceLimits, LoadAdapter, Plan, Result
from quire.foundation.processes.shared_memory import SharedMemory
from quire.planning.kv_cache_plan import NumBlocks
from quire.runtime.executor import rank_processes
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.gpu_executor import GpuExecutor
from quire.runtime.executor.gpu_rank import GpuRank
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor
from quire.runtime.executor.rank_messages import Bitmasks, FromRank, StepDone, Stop, ToRanks, fingerprint
from quire.runtime.executor.rank_processes import RankProcesses
from quire.runtime.worker.worker import Worker
from tests.checkpoints import VOCAB_SIZE, make_llama
from tests.executor.test_cpu_executor import first, next_
from tests.executor.test_gpu_executor import run
from tests.lora.adapter_files import write
from tests.worker.driver import config_for

STEPS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


class AllAtOnce:
    """An engine that has sent everything already, as for a rank that is behind the one that answers."""

    def __init__(self, messages: list[ToRanks]) -> None:
        self._messages = deque(messages)
        self.said: list[FromRank] = []

    def send(self, message: FromRank) -> None:
        self.said.append(message)

    def receive(self) -> ToRanks:
        return self._messages.popleft()

    def poll(self) -> ToRanks | None:
        return self._messages.popleft() if self._messages else None

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def agree(self, blocks: NumBlocks) -> NumBlocks:
        return blocks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_behind_has_no_more_steps_in_flight(
    rank: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are there for so many. One rank says all, the other what it has sampled."""
    in_flight = most = 0
    launch, finish = Worker.launch, Worker.finish

    def counted(self: Worker, plan: Plan) -> Any:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        return launch(self, plan)

    def finished(self: Worker, handle: Any) -> Result:
        nonlocal in_flight
        in_flight -= 1
        return finish(self, handle)

    monkeypatch.setattr(GpuExecutor, "_build_worker", lambda self, _: Worker(config_for(tiny), SystemClock()))
    monkeypatch.setattr(Worker, "launch", counted)
    monkeypatch.setattr(Worker, "finish", finished)
    plans = [first(), *map(next_, range(2, STEPS + 1))]
    channel = AllAtOnce([*plans, Stop()])
    memory = SharedMemory(3 * LINE)
    GpuRank(config_for(tiny), Mesh(rank, tp=2), channel, memory).run()
    assert most == GpuExecutor.max_in_flight
    assert memory.view[rank * LINE] == STEPS
    assert not memory.view[(1 - rank) * LINE]
    limits, *said = channel.said
    assert isinstance(limits, DeviceLimits)
    monkeypatch.undo()
    local = CpuExecutor(config_for(tiny), SystemClock())
    local.start()
    wanted = run(local, plans)
    local.close()
    if rank == 0:
        assert [(each.step, each.tokens) for each in said if isinstance(each, Result)] == wanted[: len(said)]
    else:
        marks = [fingerprint(Result(step, [1] * len(tokens), tokens)) for step, tokens in wanted]
        assert [(each.step, each.tokens) for each in said if isinstance(each, StepDone)] == [
            (step, mark) for (step, _), mark in zip(wanted, marks, strict=True)
        ][: len(said)]
    assert len(said) >= STEPS - GpuExecutor.max_in_flight, "at Stop nobody waits for the last ones"


@pytest.mark.parametrize("number", [1, 3])
def test_bitmasks_are_taken_while_plans_wait(number: int, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of several stages has more plans in flight than a rank: those behind a masked step may come before its
    bitmasks, and these before there is room for the step."""
    monkeypatch.setattr(GpuExecutor, "_build_worker", lambda self, _: Worker(config_for(tiny), SystemClock()))
    allowed = bytearray(VOCAB_SIZE // 8)
    allowed[3] = 1 << 2
    plans = [first(), *map(next_, range(2, 6))]
    plans[number - 1] = msgspec.structs.replace(plans[number - 1], masked=[0])
    channel = AllAtOnce([*plans, Bitmasks(number, [0], [bytes(allowed)]), Stop()])
    GpuRank(config_for(tiny), Mesh(), channel, SharedMemory(2 * LINE)).run()
    results = [message for message in channel.said if isinstance(message, Result)]
    assert [result.step for result in results] == [1, 2, 3], "at Stop nobody waits for the last ones"
    assert [result.tokens == [26] for result in results] == [step == number for step in (1, 2, 3)]


def test_no_stage_launches_what_waits_for_bitmasks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage's device would wait for tokens of a masked step, however long the engine takes."""
    launched = list[int]()

    def launch(self: Worker, plan: Plan) -> Any:
        launched.append(plan.step)
        assert not plan.masked
        return whole(self, plan)

    whole = Worker.launch
    monkeypatch.setattr(GpuExecutor, "_build_worker", lambda self, _: Worker(config_for(tiny), SystemClock()))
    monkeypatch.setattr(Worker, "launch", launch)
    masked = msgspec.structs.replace(first(), masked=[0])
    channel = AllAtOnce([masked, next_(2), next_(3), Stop()])
    GpuRank(config_for(tiny), Mesh(0, pp=2), channel, SharedMemory(2 * LINE)).run()
    assert launched == [1]
    channel = AllAtOnce([masked, next_(2), next_(3), Bitmasks(1, [0], []), Stop()])
    GpuRank(config_for(tiny), Mesh(0, pp=2), channel, SharedMemory(2 * LINE)).run()
    assert launched == [1, 1, 2, 3]


def test_adapters_are_loaded_between_steps_and_answered(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {f"{at}.lora_A.weight": torch.ones(4, 112), f"{at}.lora_B.weight": torch.ones(64, 4)}
    poet, lawyer = Adapter("poet", str(write(tmp_path / "poet", tensors)), ""), Adapter("lawyer", "nowhere", "")
    config = config_for(tiny, enable_lora=True)
    monkeypatch.setattr(GpuExecutor, "_build_worker", lambda self, _: Worker(config, SystemClock()))
    channel = AllAtOnce([LoadAdapter(poet, 1), first(), LoadAdapter(lawyer, 0), next_(2), Stop()])
    GpuRank(config, Mesh(1, tp=2), channel, SharedMemory(3 * LINE)).run()
    good, bad = (each for each in channel.said if isinstance(each, AdapterLoaded))
    assert (good.adapter.name, len(good.adapter.digest), good.slot, good.error) == ("poet", 64, 1, "")
    assert (bad.adapter, bad.slot) == (lawyer, 0)
    assert "nowhere" in bad.error


def test_host_blocks_are_ready_when_they_are_in_all_ranks(tiny: Path) -> None:
    class Two:
        def name(self, rank: int) -> str:
            return f"Rank {rank} of 2"

    executor = MultiRankExecutor(config_for(tiny, tensor_parallel_size=2, device="cuda"), SystemClock())
    executor._ranks = Two()  # type: ignore[assignment]
    tokens = fingerprint(Result(0, [], []))
    executor._take([(0, Result(1, [], [], ready_host_blocks=50)), (1, StepDone(1, tokens))])
    executor._take([(0, Result(2, [], [])), (1, StepDone(2, tokens, 30))])
    executor._take([(0, Result(3, [], [])), (1, StepDone(3, tokens, 60))])
    executor._take([(0, Result(4, [], [])), (1, StepDone(4, tokens))])
    executor._take([(0, Result(5, [], [])), (1, StepDone(5, tokens))])
    assert [result.ready_host_blocks for result in executor._results] == [0, 0, 30, 50, 0]


class Seconds:
    """A clock that is set."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


@pytest.mark.parametrize("on_gpus", [True, False])
def test_a_rank_that_keeps_other_gpus_waiting_is_named(on_gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the others wait on the device. On a CPU one that waits says so itself."""
    monkeypatch.setattr(rank_processes, "process_state", lambda pid: "S")
    monkeypatch.setattr(RankProcesses, "name", lambda self, rank: f"Rank {rank} of 2")
    ranks, clock, memory = object.__new__(RankProcesses), Seconds(), SharedMemory(3 * LINE)
    words = memoryview(memory.view).cast("I")
    vars(ranks).update(
        _clock=clock, _last_look=0.0, _stopped_s=0.0, _still_s=0.0, _progress=(), _is_late=False, _patience_s=20.0,
        _mesh=Mesh(tp=2), number=2, _here=range(2), _words=[words], _on_gpus=on_gpus,
        _children=[type("Child", (), {"pid": 1})] * 2,
    )  # fmt: skip
    words[0], words[LINE // 4] = 7, 6

    def look_for(seconds: float) -> None:
        end = clock.at + seconds
        while clock.at < end:
            clock.at += 1.0
            ranks._look()

    look_for(15)
    words[LINE // 4] = 7
    look_for(40)
    words[0] = 8
    look_for(15)
    if on_gpus:
        with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 was stuck: in step 8 the others waited 20 s for it"):
            look_for(10)
    else:
        look_for(30)
