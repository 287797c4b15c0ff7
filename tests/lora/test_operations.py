"""A thousand random operations on a model on a CPU: each answer is what PEFT computes with the adapter meant."""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire import LLM
from quire.foundation.messages.from_engine import Deltas, Done, End
from quire.foundation.messages.to_engine import Abort, Adapter, Add, Control
from quire.models.lora.updates import HostAdapter
from quire.sampling_params import SamplingParams
from tests.adapters import ALL, Reference, make_adapter
from tests.checkpoints import make_tiny

pytestmark = pytest.mark.long("engine")

KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8},
    "other weights": {"rank": 8},
    "stabilised": {"rank": 4, "modules": ("q_proj", "down_proj"), "use_rslora": True},
    "magnitudes": {"rank": 8, "modules": ALL[:4], "use_dora": True},
    "all magnitudes": {"rank": 4, "use_dora": True},
    "one layer": {"rank": 16, "modules": ALL[4:], "layers_to_transform": [1]},
}
PROMPTS = [[7 * at % 290 + 3 for at in range(length)] for length in (3, 18, 18, 35)]
PROMPTS[2][-1] = 5  # shares a prefix with the one before it
COUNT, SLOTS, KEPT, PATHS = 8, 2, 3, 4


class Asked(NamedTuple):
    """A request: which prompt, how many tokens, and which adapter, of which contents."""

    prompt: int
    count: int
    adapter: Adapter | None
    contents: str


class Served:
    """An engine in this process, and what it has said."""

    def __init__(self, model: Path) -> None:
        self.llm = LLM(
            str(model), dtype="float32", device="cpu", enable_lora=True, max_loras=SLOTS, max_cpu_loras=KEPT,
            skip_tokenizer_init=True, num_gpu_blocks_override=16, max_num_seqs=4, max_num_batched_tokens=16,
            max_model_len=64, swap_space=0.001,
        )  # fmt: skip
        self.client = self.llm._local.client
        self.got: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}
        self.done: dict[int, Done] = {}

    def take(self, timeout: float = 0.0) -> None:
        match self.client.receive(timeout):
            case Deltas() as deltas:
                at = 0
                for number, count in zip(deltas.ids, deltas.counts, strict=True):
                    self.got.setdefault(number, []).extend(deltas.tokens[at : at + count])
                    at += count
                self.ends |= {end.id: end for end in deltas.ends}
            case Done() as done:
                self.done[done.id] = done

    def until(self, what: Any) -> None:
        for _ in range(20_000):
            if what():
                return
            self.take(0.01)
        raise AssertionError("it does not come")

    def command(self, number: int, action: str, **value: str) -> Done:
        self.client.send(Control(number, action, value))
        self.until(lambda: number in self.done)
        return self.done[number]

    def held(self) -> tuple[int, int, int]:
        """Descriptors and threads of this process, and adapters in its memory; what other tests left may go."""
        gc.collect()
        adapters = sum(type(each) is HostAdapter for each in gc.get_objects())
        return len(os.listdir("/proc/self/fd")), threading.active_count(), adapters


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A model, and adapters by their contents."""
    directory = tmp_path_factory.mktemp("operations")
    model = make_tiny(directory / "model", "Qwen3ForCausalLM", head_dim=16)
    kinds = enumerate(KINDS.items())
    return model, {name: make_adapter(directory / name, model, seed=seed, **kind) for seed, (name, kind) in kinds}


@pytest.fixture(scope="module")
def expected(made: tuple[Path, dict[str, Path]]) -> dict[tuple[int, str], list[int]]:
    """PEFT's greedy tokens, by prompt and contents; no two of a prompt are alike."""
    reference, names = Reference(*made), ["", *KINDS]
    found = {
        (prompt, name): reference.greedy(PROMPTS[prompt], name or None, COUNT)
        for prompt in range(len(PROMPTS))
        for name in names
    }
    for prompt in range(len(PROMPTS)):
        assert len({tuple(found[prompt, name]) for name in names}) == len(names)
    return found


@pytest.fixture
def served(made: tuple[Path, dict[str, Path]]) -> Iterator[Served]:
    served = Served(made[0])
    yield served
    served.llm.close()


def test_a_thousand_operations_never_answer_with_another_adapter_and_leave_nothing_behind(
    made: tuple[Path, dict[str, Path]],
    expected: dict[tuple[int, str], list[int]],
    served: Served,
    tmp_path: Path,
) -> None:
    """Load, replace, unload, files that change or go while requests run and wait, aborts."""
    luck, contents = random.Random(11), made[1]
    files: dict[str, str] = {}  # by path, what lies there
    names: dict[str, tuple[Adapter, str]] = {}  # what should be loaded
    digests: dict[str, str] = {}
    asked: dict[int, Asked] = {}
    aborted: set[int] = set()

    def put(path: str, name: str | None) -> None:
        shutil.rmtree(path, ignore_errors=True)
        files.pop(path, None)
        if name is not None:
            shutil.copytree(contents[name], path)
            files[path] = name

    for path in range(PATHS):
        put(str(tmp_path / str(path)), luck.choice(list(contents)))
    before = served.held()
    for number in range(1, 1_201):
        name, path = f"name{luck.randrange(4)}", str(tmp_path / str(luck.randrange(PATHS)))
        match luck.choice(["load", "unload", "change", "break", "abort", *["add"] * 5, *["turn"] * 6]):
            case "load":
                done = served.command(number, "load_adapter", name=name, path=path)
                assert bool(done.error) == (path not in files)
                if not done.error:
                    digest = digests.setdefault(files[path], done.value["digest"])
                    assert done.value == {"name": name, "path": path, "digest": digest}
                    names[name] = Adapter(name, path, digest), files[path]
            case "unload":
                assert bool(served.command(number, "unload_adapter", name=name).error) == (name not in names)
                names.pop(name, None)
            case "change":
                put(path, luck.choice(list(contents)))
            case "break":
                put(path, None)
            case "abort" if asked:
                victim = luck.choice(list(asked))
                aborted.add(victim)
                served.client.send(Abort([victim]))
            case "add":
                adapter, own = luck.choice([(None, ""), *names.values()])
                asked[number] = Asked(luck.randrange(len(PROMPTS)), luck.randint(1, COUNT), adapter, own)
                prompt, count, *_ = asked[number]
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                tokens = PROMPTS[prompt]
                served.client.send(Add(number, tokens, len(tokens), params, [], number, 0.0, adapter=adapter))
            case "turn":
                served.take()
    served.until(lambda: len(served.ends) == len(asked))

    outcomes: Counter[tuple[str, bool]] = Counter()
    for number, (prompt, count, adapter, own) in asked.items():
        end, tokens = served.ends[number], served.got.get(number, [])
        outcomes[end.reason, adapter is not None] += 1
        if end.reason == "error":  # its files were not what they had been when it was to come back
            assert adapter is not None
            assert adapter.path in end.message
            assert not tokens
            continue
        assert tokens == expected[prompt, own][: len(tokens)], own
        assert len(tokens) == count or number in aborted
    assert outcomes["length", True] > 100
    assert outcomes["length", False] > 20
    assert outcomes["error", True]
    check_nothing_is_held(served, before)
    assert {each.name for each in served.client._core._adapters} == set(names)


def check_nothing_is_held(served: Served, before: tuple[int, int, int]) -> None:
    counts = served.client.counts()
    assert counts["requests"] == 0
    assert counts["free_blocks"] == counts["blocks"]
    slots = served.client._core._adapter_slots
    assert slots is not None
    assert slots.num_free == SLOTS
    assert not slots._waiting
    assert not any(slot.users for slot in slots._slots)
    descriptors, threads, adapters = served.held()
    assert descriptors <= before[0]
    assert threads <= before[1]
    assert adapters <= before[2] + KEPT + 1
