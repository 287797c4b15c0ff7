"""Adapters by request: slots given and taken, names loaded and unloaded, and never another adapter's tokens or cache.

The fake executor's tokens depend on what is in the adapter's slot when a row is computed, and it insists that keys and
values are read by those alone who computed with the same adapter, and that no slot is written that a step in flight
reads.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from quire.engine.adapter_registry import load_modules
from quire.engine.adapter_slots import MAX_PASSES
from quire.engine.inprocess import InProcessClient
from quire.errors import CheckpointError
from quire.foundation.config import Config
from quire.foundation.config.lora import LoraConfig
from quire.foundation.messages.from_engine import Deltas, Done, End, Ready
from quire.foundation.messages.to_engine import Abort, Adapter, Add, Control
from quire.sampling_params import SamplingParams
from tests.executor.fake import FakeExecutor, adapted_counter, hash_token
from tests.executor.fake_adapters import FakeAdapters

VOCAB = 512


def expected(prompt: list[int], digest: str, count: int) -> list[int]:
    """What a sequence is answered with."""
    tokens = list(prompt)
    for number in range(count):
        counter = adapted_counter(number, digest) if digest else number
        tokens.append(hash_token(tokens, counter, VOCAB))
    return tokens[len(prompt) :]


class Engine:
    """An engine over fakes, and what it has said."""

    def __init__(self, files: dict[str, str], delay: Any = lambda: 1, blocks: int = 64, **settings: Any) -> None:
        self.files = FakeAdapters(files, delay)
        self.executor = FakeExecutor(blocks, 4, VOCAB, num_host_blocks=8, adapters=self.files)
        config = Config().with_values(
            max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16, block_size=8, enable_lora=True, **settings
        )
        object.__setattr__(config.cache, "block_size", 4)
        self.client = InProcessClient(config, self.executor)
        self.got: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}
        self.done: dict[int, Done] = {}
        self.running: Sequence[str] = []
        self.ready = self.client.receive(None)
        assert isinstance(self.ready, Ready)

    def take(self) -> None:
        """What the engine says next, if anything."""
        match self.client.receive(0.0):
            case Deltas() as deltas:
                self.running = deltas.load.running_adapters
                at = 0
                for number, count in zip(deltas.ids, deltas.counts, strict=True):
                    self.got.setdefault(number, []).extend(deltas.tokens[at : at + count])
                    at += count
                for end in deltas.ends:
                    assert end.id not in self.ends
                    self.ends[end.id] = end
            case Done() as done:
                assert done.id not in self.done
                self.done[done.id] = done

    def until(self, what: Any) -> None:
        for _ in range(5_000):
            if what():
                return
            self.take()
        raise AssertionError("it does not come")

    def command(self, number: int, action: str, **value: str) -> Done:
        self.client.send(Control(number, action, value))
        self.until(lambda: number in self.done)
        return self.done[number]

    def add(self, number: int, prompt: list[int], count: int, adapter: Adapter | None) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.client.send(Add(number, prompt, len(prompt), params, [], number, 0.0, adapter=adapter))


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_random_operations_never_answer_with_another_adapter(seed: int) -> None:
    """Load, replace, unload, files that change or break, requests, aborts: each answer is its own adapter's."""
    luck = random.Random(seed)
    files = {f"path{i}": f"digest{i}" for i in range(8)}
    slots = luck.choice([1, 2, 3])
    engine = Engine(files, delay=lambda: luck.choice([1, 1, 2, 9]), blocks=luck.choice([40, 64]), max_loras=slots)
    names: dict[str, Adapter] = {}  # what should be there
    asked: dict[int, tuple[list[int], int, Adapter | None]] = {}
    aborted: set[int] = set()
    outcomes: Counter[str] = Counter()
    for number in range(1, 1_001):
        match luck.choice(["load", "unload", "change", "break", "abort", *["add"] * 6, *["turn"] * 6]):
            case "load":
                name, path = f"name{luck.randrange(4)}", f"path{luck.randrange(8)}"
                done = engine.command(number, "load_adapter", name=name, path=path)
                assert bool(done.error) == (path not in files)
                if not done.error:
                    names[name] = Adapter(name, path, files[path])
                    assert done.value == {"name": name, "path": path, "digest": files[path]}
            case "unload":
                name = f"name{luck.randrange(4)}"
                assert bool(engine.command(number, "unload_adapter", name=name).error) == (name not in names)
                names.pop(name, None)
            case "change":
                files[f"path{luck.randrange(8)}"] = f"other{number}"
            case "break":
                files.pop(f"path{luck.randrange(8)}", None)
            case "abort" if asked:
                victim = luck.choice(list(asked))
                aborted.add(victim)
                engine.client.send(Abort([victim]))
            case "add":
                adapter = luck.choice([None, *names.values()])
                stem = [7 * i % VOCAB for i in range(luck.choice([3, 12, 30]))]
                asked[number] = [*stem, luck.randrange(4)], luck.randint(1, 12), adapter
                engine.add(number, *asked[number])
            case "turn":
                engine.take()
    engine.until(lambda: len(engine.ends) == len(asked))
    for number, (prompt, count, adapter) in asked.items():
        end, digest = engine.ends[number], adapter.digest if adapter else ""
        outcomes[end.reason] += 1
        if end.reason == "error":
            assert adapter is not None
            assert adapter.path in end.message
            assert not engine.got.get(number)
            continue
        assert end.reason == "length" or number in aborted
        tokens = engine.got.get(number, [])
        assert tokens == expected(prompt, digest, count)[: len(tokens)]
        assert len(tokens) == count or number in aborted
    assert outcomes["length"] > 200
    assert outcomes["error"]
    counts = engine.client.counts()
    assert counts["requests"] == 0
    assert counts["free_blocks"] == counts["blocks"]
    held = engine.client._core._adapter_slots
    assert held is not None
    assert held.num_free == slots
    assert not held._waiting
    assert not any(slot.users for slot in held._slots)
    assert set(names) == {adapter.name for adapter in engine.client._core._adapters}


def test_equal_prompts_share_what_they_share_an_adapter_in() -> None:
    """The same adapter's cache always, also under another name; never another's, nor the base model's."""
    engine = Engine({"x": "dx", "y": "dy"}, max_loras=2)
    prompt = list(range(40))
    order = [None, ("a", "x", "dx"), ("b", "y", "dy"), ("c", "x", "dx"), None]
    for number, adapter in enumerate(order):
        engine.add(number, prompt, 3, Adapter(*adapter) if adapter else None)
        engine.until(lambda number=number: number in engine.ends)
        assert engine.got[number] == expected(prompt, adapter[2] if adapter else "", 3)
    assert [engine.ends[number].cached_tokens for number in range(5)] == [0, 0, 0, 36, 36]


def test_every_name_that_runs_is_told_also_two_of_one_adapter() -> None:
    """A slot's adapter has the name it was loaded under; what runs is called as requests call it."""
    engine = Engine({"x": "dx"}, max_loras=1)
    engine.add(1, [1, 2, 3], 4, Adapter("first", "x", "dx"))
    engine.until(lambda: 1 in engine.ends)
    for number, name in enumerate(("second", "third", "second"), 2):
        engine.add(number, [1, 2, 3], 20 + number, Adapter(name, "x", "dx"))
    engine.until(lambda: len(engine.got) == 4)
    assert engine.running == ["second", "third"]
    engine.until(lambda: 3 in engine.ends)
    assert engine.running == ["second"]
    engine.until(lambda: len(engine.ends) == 4)
    assert engine.running == []


def test_requests_of_other_adapters_run_while_one_is_on_its_way() -> None:
    engine = Engine({"x": "dx", "y": "dy"}, delay=iter([1, 400]).__next__, max_loras=2)
    engine.add(1, [1, 2, 3], 4, Adapter("x", "x", "dx"))
    engine.until(lambda: 1 in engine.ends)
    engine.add(2, [1, 2, 3], 4, Adapter("y", "y", "dy"))
    engine.add(3, [1, 2, 3], 20, Adapter("x", "x", "dx"))
    engine.add(4, [1, 2, 3], 20, None)
    engine.until(lambda: 3 in engine.ends and 4 in engine.ends)
    assert 2 not in engine.ends
    engine.until(lambda: 2 in engine.ends)
    assert engine.got[2] == expected([1, 2, 3], "dy", 4)


def test_nobody_waits_for_ever_for_a_slot() -> None:
    """Requests of an adapter that is there pass one that waits, but only so many of them."""
    engine = Engine({"x": "dx", "y": "dy"}, max_loras=1)
    engine.add(1, [1, 2, 3], 30, Adapter("x", "x", "dx"))
    engine.until(lambda: engine.got.get(1))
    engine.add(2, [5], 2, Adapter("y", "y", "dy"))
    number = 2
    while 2 not in engine.ends:
        running = sum(each not in engine.ends for each in range(3, number + 1))
        if running < 3:
            number += 1
            engine.add(number, [1, 2, 3], 30, Adapter("x", "x", "dx"))
        engine.take()
        assert number < MAX_PASSES + 20
    assert number > MAX_PASSES  # they did pass it
    assert engine.got[2] == expected([5], "dy", 2)


def test_a_pinned_adapter_stays_and_others_say_so_where_all_are_pinned() -> None:
    modules = {"lora_modules": ("p=x", '{"name": "q", "path": "y"}'), "max_loras": 2}
    engine = Engine({"x": "dx", "y": "dy", "z": "dz"}, **modules, lora_pinned=("p",))
    engine.until(lambda: engine.files.slots == {1: "dx"})
    for number, path in enumerate("yzyz"):
        engine.add(number, [1], 2, Adapter(path, path, f"d{path}"))
        engine.until(lambda number=number: number in engine.ends)
        assert engine.files.slots[1] == "dx"
    engine = Engine({"x": "dx", "y": "dy", "z": "dz"}, **modules, lora_pinned=("p", "q"))
    engine.add(1, [1], 2, Adapter("z", "z", "dz"))
    engine.add(2, [1], 2, Adapter("p", "x", "dx"))
    engine.until(lambda: len(engine.ends) == 2)
    assert "--max-loras" in engine.ends[1].message
    assert engine.got[2] == expected([1], "dx", 2)


def test_an_engine_without_adapters_refuses_them_and_goes_on() -> None:
    client = InProcessClient(
        Config().with_values(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16), FakeExecutor()
    )
    assert isinstance(client.receive(None), Ready)
    client.send(Control(1, "load_adapter", {"name": "a", "path": "x"}))
    client.send(Add(2, [1], 1, SamplingParams(max_tokens=1), [], 1, 0.0, adapter=Adapter("a", "x", "d")))
    said = [client.receive(None), client.receive(None)]
    (done,) = [message for message in said if isinstance(message, Done)]
    (deltas,) = [message for message in said if isinstance(message, Deltas)]
    assert "--enable-lora" in done.error
    assert "--enable-lora" in deltas.ends[0].message


def test_a_module_that_does_not_serve_ends_the_start() -> None:
    with pytest.raises(CheckpointError, match=r"--lora-modules b: nowhere cannot be read"):
        Engine({"x": "dx"}, lora_modules=("a=x", "b=nowhere"))


def test_an_engine_that_takes_anothers_place_goes_on_without_modules_that_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lora = LoraConfig(enable_lora=True, lora_modules=("a=gone", "b=x"))
    with pytest.raises(CheckpointError):
        load_modules(lora, FakeAdapters({"x": "dx"}))
    assert load_modules(lora, FakeAdapters({"x": "dx"}), is_restart=True) == [Adapter("b", "x", "dx")]
    assert "--lora-modules a is left out: gone cannot be read." in caplog.text


def test_a_slot_is_not_written_while_a_step_in_flight_reads_it() -> None:
    """A request that is aborted in the middle of a step leaves a row behind, whose adapter must stay until its end."""
    engine = Engine({"x": "dx", "y": "dy"}, max_loras=1)
    engine.add(1, [1, 2, 3], 60, Adapter("x", "x", "dx"))
    engine.until(lambda: engine.got.get(1))
    engine.add(2, [5], 2, Adapter("y", "y", "dy"))
    for _ in range(5):
        engine.take()
    engine.client.send(Abort([1]))
    engine.until(lambda: 2 in engine.ends)  # the fake insists
    assert engine.got[2] == expected([5], "dy", 2)


def test_commands_are_answered_by_their_own_adapter() -> None:
    engine = Engine({"x": "dx", "y": "dy"}, delay=lambda: 3)
    for number, name in enumerate("xxy", 1):
        engine.client.send(Control(number, "load_adapter", {"name": name, "path": name}))
    engine.until(lambda: len(engine.done) == 3)
    assert [engine.done[number].value["digest"] for number in (1, 2, 3)] == ["dx", "dx", "dy"]
