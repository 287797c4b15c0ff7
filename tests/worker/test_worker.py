"""Loading: sizes, dtypes, dummy weights, and what is said when memory does not do."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.errors import CheckpointError, ConfigError, MemoryBudgetError
from quire.foundation.clock import SystemClock
from quire.foundation.messages.workers import Plan
from quire.models.spec import read_spec
from quire.planning.kv_cache_plan import NumBlocks
from quire.runtime.worker import worker_parts
from quire.runtime.worker.startup.starting_runner import StartingRunner
from quire.runtime.worker.worker import Worker
from quire.runtime.worker.worker_parts import WorkerParts
from tests.checkpoints import make_llama
from tests.worker.driver import Driver, admitted, config_for
from tests.worker.fake_streams import use_gpu_transfer
from tests.worker.test_pinned_host_pool import Pinner


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False)


def test_sizing_from_bytes_and_from_blocks(tiny: Path) -> None:
    per_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, kv heads, head_dim, fp32
    config = config_for(tiny, num_gpu_blocks_override=None, kv_cache_memory_bytes=10 * 16 * per_token + 5)
    device_limits = Worker(config, SystemClock()).load()
    assert (device_limits.num_blocks, device_limits.vocab_size) == (10, 320)
    assert set(device_limits.startup) == {"kernels", "weights", "kv_cache", "graphs"}
    assert Worker(config_for(tiny), SystemClock()).load().num_blocks == 128


def test_no_swap_space_is_no_error(tiny: Path) -> None:
    assert Worker(config_for(tiny, swap_space=0), SystemClock()).load().num_host_blocks == 0


def empty_plan(step: int) -> Plan:
    return Plan.empty(step)


def test_on_a_cpu_all_host_blocks_are_ready_at_once(tiny: Path) -> None:
    worker = Worker(config_for(tiny, swap_space=0.001), SystemClock())
    blocks = worker.load().num_host_blocks
    assert blocks > 0
    assert [worker.execute(empty_plan(step)).ready_host_blocks for step in (1, 2)] == [blocks, 0], "said once"


def test_host_blocks_are_reported_when_they_are_pinned(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinner = Pinner()
    pinner.gate.clear()
    use_gpu_transfer(monkeypatch, pinner.pin, pinner.unpin)
    worker = Worker(config_for(tiny, swap_space=0.001), SystemClock())
    blocks = worker.load().num_host_blocks
    assert worker.execute(empty_plan(1)).ready_host_blocks == 0
    pinner.gate.set()
    deadline = time.monotonic() + 60
    step, reported = 2, 0
    while not reported and time.monotonic() < deadline:
        reported, step = worker.execute(empty_plan(step)).ready_host_blocks, step + 1
    assert reported == blocks
    assert worker.execute(empty_plan(step)).ready_host_blocks == 0, "nothing new"
    worker.close()
    assert pinner.open == 0


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100}, "--kv-cache-memory-bytes"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override"),
        ({"num_gpu_blocks_override": 10**12}, "--num-gpu-blocks-override"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_by_flag(tiny: Path, values: dict[str, int | None], flag: str) -> None:
    with pytest.raises((ConfigError, MemoryBudgetError), match=flag):
        Worker(config_for(tiny, **values), SystemClock()).load()


def test_weights_that_do_not_fit_are_refused_by_flag(tmp_path: Path) -> None:
    make_llama(tmp_path, tokenizer=False)
    config = (tmp_path / "config.json").read_text().replace('"vocab_size": 320', '"vocab_size": 2000000000')
    (tmp_path / "config.json").write_text(config.replace('"hidden_size": 64', '"hidden_size": 2000000'))
    with pytest.raises(MemoryBudgetError, match="--dtype"):
        Worker(config_for(tmp_path, load_format="dummy"), SystemClock()).load()


@pytest.mark.parametrize(
    ("owner", "call", "flag"),
    [
        (WorkerParts, "slot_table", "--max-num-seqs"),
        (WorkerParts, "runner", "--gpu-memory"),
        (StartingRunner, "capture_graphs", "--enforce-eager"),
    ],
)
def test_what_else_does_not_fit_on_a_gpu_is_refused_by_flag(
    tiny: Path, owner: type, call: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, call, _run_out)
    with pytest.raises(MemoryBudgetError, match=flag):
        Worker(config_for(tiny, max_cudagraph_capture_size=2), SystemClock()).load()


def test_the_number_of_blocks_may_be_agreed_between_the_steps_of_a_start(tiny: Path) -> None:
    """As ranks do: each step takes values of the steps before it, and leaves all else to the caller."""
    worker = Worker(config_for(tiny, block_size=16), SystemClock())
    loaded = worker.read_weights()
    assert worker.measure(loaded).bytes_left is None
    worker.allocate(loaded, NumBlocks(3, 2))
    worker.capture_graphs(loaded)
    owner = admitted(0, seed=1, num_sampled=0, temperature=0.0)
    plan = Plan(
        step=1,
        admitted=[owner],
        block_slots=[0] * 3,
        block_groups=[0] * 3,
        block_indices=[0, 1, 2],
        block_ids=[3, 1, 2],
        slots=[0],
        counts=[40],
        token_rows=[0],
        tokens=[5] * 40,
        sampled_rows=[0],
    )
    out = worker.execute(plan)
    swap = {"swap_out": [(1, 0), (2, 1)], "swap_in": []}
    worker.execute(Plan(step=2, **swap))
    assert (len(out.tokens), out.errors) == (1, [])


@pytest.mark.parametrize("error", [MemoryBudgetError("Even one block"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_compile_warm_up_without_memory_is_left_out(
    tiny: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        asked.append(error)
        raise error

    asked: list[Exception] = []
    monkeypatch.setattr(worker_parts, "allocate_kv_cache", run_out)
    spec = read_spec(tiny)
    assert not Worker(config_for(tiny), SystemClock())._warm_up_compilation(spec)
    assert asked == [error]


def _run_out(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_unresolved_settings_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="auto"):
        Worker(config_for(tiny, dtype="auto"), SystemClock()).load()
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Worker(config_for(tiny, max_num_seqs=None), SystemClock()).load()


def test_files_are_checked_against_the_config_before_reading(tiny: Path, tmp_path: Path) -> None:
    make_llama(tmp_path, tokenizer=False, layers=4)
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..* has no such weight"):
        Worker(config_for(tmp_path), SystemClock()).load()


def test_dummy_weights_need_no_files(tiny: Path, tmp_path: Path) -> None:
    """And differ by seed, and repeat by seed."""
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    texts = []
    for seed in (1, 1, 2):
        driver = Driver(config_for(tmp_path, load_format="dummy", seed=seed))
        texts.append(driver.generate([driver.admit(0, [5, 6, 7])], 5)[0])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_bf16_is_as_close_to_fp32_as_transformers_is(stored: str, tmp_path: Path) -> None:
    """Mean error of log probabilities over the whole vocabulary, against fp32 arithmetic on the same weights."""
    from transformers import LlamaForCausalLM

    directory = make_llama(tmp_path, tokenizer=False, dtype=stored)  # type: ignore[arg-type]
    prompt = np.random.default_rng(0).integers(3, 320, 60).tolist()
    driver = Driver(config_for(directory, dtype="bfloat16"))
    ours = np.zeros((60, 320))
    sequence = driver.admit(0, prompt, logprobs=320)
    driver.move([(sequence, 60)])
    sequences = [driver.admit(i, prompt[: 4 * i + 3], logprobs=320) for i in range(1, 14)]
    driver.move([(s, len(s.prompt)) for s in sequences])
    for s in [sequence, *sequences]:
        entry = s.logprobs[0]
        assert entry is not None
        ours[len(s.prompt) - 1, entry.top_ids] = entry.top_logprobs
    places = [len(s.prompt) - 1 for s in [sequence, *sequences]]
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(dtype)
        with torch.inference_mode():
            theirs[dtype] = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1).numpy()[places]
    exact = theirs[torch.float32]
    error, accepted = (np.abs(x - exact).mean() for x in (ours[places], theirs[torch.bfloat16]))
    assert 0 < error < 1.25 * accepted


def test_attention_is_told_how_much_of_each_row_stands_already(tiny: Path) -> None:
    """Also where a slot had an owner before, of whom nothing is left."""
    driver = Driver(config_for(tiny))
    attention, seen = driver.worker._runner._attention, []
    build = attention.build_metadata
    attention.build_metadata = lambda counts, bounds, _: seen.append(bounds.tolist()) or build(counts, bounds)  # type: ignore
    for prompt in ([3] * 40, [4] * 40):
        driver.generate([driver.admit(0, prompt)], 2, chunk=32)
    assert seen == [[0], [32], [40]] * 2


def test_a_worker_imports_nothing_that_only_reads_text() -> None:
    code = "import sys, quire.runtime.worker.worker; assert 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
