"""Ranks on several nodes: the results of one rank, and an end that names the node or rank that is to blame."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from quire.errors import CheckpointError, EngineDeadError
from quire.foundation.clock import SystemClock
from quire.foundation.messages.to_engine import Adapter
from quire.foundation.messages.workers import AdapterLoaded, LoadAdapter
from quire.foundation.processes.launch import EXIT_CRASHED
from quire.runtime.executor.cpu_executor import CpuExecutor
from quire.runtime.executor.executor import Executor
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor
from quire.runtime.executor.nodes.head_ranks import HeadRanks
from tests.checkpoints import make_llama
from tests.executor.nodes.follower import KEY, Follower, free_port
from tests.executor.test_cpu_executor import first, next_
from tests.executor.test_gpu_executor import run
from tests.executor.test_multi_rank_executor import collect_all, gone
from tests.lora.adapter_files import write
from tests.worker.driver import config_for


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NODE_KEY", KEY)


class Patience:
    """A clock that a test sets."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def suppress_dead(start: Callable[[], object]) -> None:
    """It is looked at afterwards."""
    with suppress(EngineDeadError):
        start()


class Nodes:
    """A head in this process, and its followers, each with a directory of the model of its own."""

    def __init__(self, tiny: Path, places: Path, tp: int, pp: int, nodes: int, **settings: object) -> None:
        self.port = free_port()
        self.flags = ("-tp", str(tp), "-pp", str(pp), "--nnodes", str(nodes), "--dtype", "float32")
        self._stack = ExitStack()
        self._tiny, self._places = tiny, places
        sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "nnodes": nodes}
        config = config_for(tiny, **sizes, master_port=self.port, **settings)
        self.head = MultiRankExecutor(config, SystemClock())
        self.followers = [self.add(node) for node in range(1, nodes)]

    def add(self, node: int, *flags: str, key: str = KEY) -> Follower:
        own = self._places / f"model of node {node}"
        if not own.exists():
            own.symlink_to(self._tiny)
        settings = ("--model", str(own), "--skip-tokenizer-init", *self.flags, *flags)
        return self._stack.enter_context(Follower(node, self.port, *settings, key=key))

    def close(self) -> None:
        self.head.close()
        self._stack.close()

    def remote_pids(self) -> list[int]:
        assert isinstance(self.head._ranks, HeadRanks)
        return [pid for node in self.head._ranks._nodes for pid in node.pids]


@pytest.fixture
def nodes(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    several = Nodes(tiny, tmp_path, *request.param)
    yield several
    several.close()


@pytest.mark.parametrize(
    "nodes",
    [
        (1, 2, 2),
        pytest.param((2, 2, 2), marks=pytest.mark.long("many cards")),
    ],
    indirect=True,
)
def test_results_are_those_of_one_rank_and_a_dead_rank_of_another_node_is_named(tiny: Path, nodes: Nodes) -> None:
    one: Executor = CpuExecutor(config_for(tiny), SystemClock())
    one.start()
    nodes.head.start()
    plans = [first(), *map(next_, range(2, 12))]
    assert run(nodes.head, plans) == run(one, plans)
    one.close()
    last = nodes.remote_pids()[-1]
    os.kill(last, signal.SIGKILL)
    number, node = nodes.head._mesh.size - 1, len(nodes.followers)
    wanted = rf"Rank {number} of {number + 1} \(process {last} on node {node}, .*\) died: .*SIGKILL"
    nodes.head.submit(next_(12))
    with pytest.raises(EngineDeadError, match=wanted):
        collect_all(nodes.head)


@pytest.mark.long("many cards")
def test_adapters_are_loaded_by_the_ranks_of_all_nodes(tiny: Path, tmp_path: Path) -> None:
    """Each stage has the layers of one node; the adapter changes the last."""
    at = "base_model.model.model.layers.2.mlp.down_proj"
    tensors = {f"{at}.lora_A.weight": torch.ones(4, 112), f"{at}.lora_B.weight": torch.ones(64, 4)}
    poet = Adapter("poet", str(write(tmp_path / "poet", tensors)), "")
    one: Executor = CpuExecutor(config_for(tiny, enable_lora=True), SystemClock())
    one.start()
    several = Nodes(tiny, tmp_path, 1, 2, 2, enable_lora=True)
    several.head.start()
    (expected,), (found,) = (load_all(executor, [(poet, 1)]) for executor in (one, several.head))
    assert found == expected
    assert not found.error
    plan = first()
    adapted = replace(plan, admitted=[replace(plan.admitted[0], adapter_slot=1)])
    later = [*map(next_, range(2, 8))]
    said = run(several.head, [adapted, *later])
    assert said == run(one, [adapted, *later])
    of_base = run(one, [first(8)] + [replace(each, step=each.step + 7) for each in later])
    assert [tokens for _, tokens in said] != [tokens for _, tokens in of_base]
    refused = load_all(several.head, [(Adapter("poet", "nowhere", ""), 0)])
    assert "nowhere" in refused[0].error
    one.close()
    several.close()


def load_all(executor: Executor, wanted: list[tuple[Adapter, int]]) -> list[AdapterLoaded]:
    for adapter, slot in wanted:
        executor.orders.post(LoadAdapter(adapter, slot))
    loaded: list[AdapterLoaded] = []
    deadline = time.monotonic() + 60
    while len(loaded) < len(wanted):
        assert time.monotonic() < deadline
        loaded += [each for each in executor.orders.done() if isinstance(each, AdapterLoaded)]
        time.sleep(0.01)
    return loaded


@pytest.mark.long("many cards")
@pytest.mark.parametrize("nodes", [(1, 2, 2)], indirect=True)
def test_a_lost_node_is_named_and_takes_part_in_the_next_engine(tiny: Path, nodes: Nodes) -> None:
    nodes.head.start()
    (pid,) = nodes.remote_pids()
    nodes.followers[0].process.kill()
    with pytest.raises(EngineDeadError, match=r"Node 1 \(.*\) with rank 1 of 2 was lost: the other side has closed"):
        collect_all(nodes.head)
    assert gone(pid), "ranks end with their node"
    nodes.head.close()
    second = nodes.add(1)
    for _ in range(2):  # the second time with a node that has followed an engine before
        again = MultiRankExecutor(nodes.head._config, SystemClock())
        again.start()
        assert [result for result, _ in run(again, [first(), next_(2)])] == [1, 2]
        failed = EngineDeadError("as if a step had failed")
        again._failure = failed
        again.close()
    again = MultiRankExecutor(nodes.head._config, SystemClock())
    again.start()
    again.close()
    assert second.wait(60) == 0
    assert "The head has ended; so does this node." in second.log
    assert second.log.count("All nodes have joined") == 3


@pytest.mark.long("many cards")
def test_a_node_with_another_key_ends_and_says_so(tiny: Path, tmp_path: Path) -> None:
    several = Nodes(tiny, tmp_path, 1, 2, 1)
    other = several.add(1, "--nnodes", "2", key="another key, long enough")
    other.wait_line("cannot be joined yet")  # it tries twice a second, so the head need not wait for it to start
    config = config_for(
        tiny, pipeline_parallel_size=2, nnodes=2, master_port=several.port, distributed_timeout_seconds=60
    )
    head = MultiRankExecutor(config, clock := Patience())
    starting = threading.Thread(target=lambda: suppress_dead(head.start))
    starting.start()
    assert other.wait(120) == 2
    assert re.search("was not joined: it has another key. Give all nodes the same key", other.last_line), other.log
    clock.seconds = 61.0  # not before the node has tried, however slow it is
    starting.join(120)
    assert re.search(
        "Node 1 of 2 did not join within 60 s .*The last one that tried: .*another key", str(head._failure)
    )
    several.close()


@pytest.mark.long("many cards")
def test_what_a_start_on_another_node_raises_is_raised(tiny: Path, tmp_path: Path) -> None:
    broken = make_llama(tmp_path / "broken", tokenizer=False)
    several = Nodes(tiny, tmp_path, 1, 2, 1)
    weights = broken / "model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with several.add(1, "--nnodes", "2", "--model", str(broken)):
        head = MultiRankExecutor(
            config_for(tiny, pipeline_parallel_size=2, nnodes=2, master_port=several.port), SystemClock()
        )
        with pytest.raises(CheckpointError, match=r"Node 1 \(.*\): .*model\.safetensors"):
            head.start()
    several.close()


@pytest.mark.long("many cards")
def test_a_node_whose_head_is_gone_ends_in_bounded_time(tiny: Path) -> None:
    flags = ("--model", str(tiny), "--skip-tokenizer-init", "-pp", "2", "--nnodes", "2")
    with Follower(1, free_port(), *flags, "--distributed-timeout-seconds", "1") as follower:
        assert follower.wait(120) == EXIT_CRASHED
        assert re.search(r"The head at 127\.0\.0\.1:\d+ was not reached for 1 s: .*refused", follower.last_line)
