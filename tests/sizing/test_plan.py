"""`quire plan`: memory as the engine divides it, targets that are kept, costs by arithmetic, errors by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cli.main import main
from quire.errors import ConfigError, ModelNotFoundError
from quire.foundation.config import Config
from quire.models.layers.layer import weight_specs_of
from quire.models.spec import read_spec
from quire.planning import machine
from quire.planning.auto_config import resolve
from quire.planning.costmodel.cards import word_of
from quire.planning.machine import Gpu, Machine
from quire.runtime.worker import worker, worker_parts
from quire.runtime.worker.kv_tensors import KVCache
from quire.runtime.worker.speculation import hidden_states
from quire.tools.simulation.load import find_model
from quire.tools.sizing.measured_rows import DIRECTORY
from quire.tools.sizing.options import read_prices
from tests.checkpoints import TINY, make_llama, make_tiny
from tests.heads import make_eagle3
from tests.mtp_heads import LAYOUTS, MtpReference

LLAMA = DIRECTORY / "llama-3.1-8b"


def plan(tmp_path: Path, *flags: str, model: str = str(LLAMA), code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        main(["plan", model, "--json", str(tmp_path / "plan.json"), *flags])
    assert end.value.code == code
    found: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    return found


def test_memory_is_divided_as_the_server_would(tmp_path: Path) -> None:
    found = plan(tmp_path, "--gpu=h200", "--formats=checkpoint", "--tensor-parallel-sizes=1")
    mib = 2**20
    gpu = Gpu("NVIDIA H200", (9, 0), 143_771 * mib, 143_771 * mib)
    config = Config().with_values(model=str(LLAMA), skip_tokenizer_init=True, max_model_len=640)
    served = resolve(config, Machine(2**37, fast_bfloat16=True, gpu=gpu)).memory
    (best,) = found["candidates"]
    assert best["bytes"]["weights"] == served.footprint.weights == 8_030_261_248 * 2
    assert best["bytes"]["kv_cache"] == served.footprint.kv_cache
    assert best["kv_tokens"] == served.num_blocks * 16
    assert found["kv_bytes_per_token"] == 131_072  # 2 × 32 layers × 8 heads × 128 × 2 bytes


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_memory_of_drafts_is_what_an_engine_takes(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights to the byte, and each block of both caches, with a head's states."""
    model, drafter = tmp_path / "model", str(tmp_path / "drafter")
    if method == "mtp":
        MtpReference(model, LAYOUTS["mimo"])
    else:
        make_llama(model, tokenizer=False)
    if method == "draft_model":
        make_llama(drafter, hidden=48, layers=2, tokenizer=False)
    if method == "eagle3":
        make_eagle3(Path(drafter), vocab_size=320)
    asked = {"method": method, "num_speculative_tokens": 2} | ({} if method == "mtp" else {"model": drafter})
    weights: list[int] = []
    caches: list[KVCache] = []
    read, fuse = worker.load_weights, hidden_states.load_fusion
    allocate, allocate_states = worker_parts.allocate_kv_cache, hidden_states.ModelStates.allocate

    def noting(load: Callable[..., None], at: int) -> Callable[..., None]:
        def loading(*own: Any) -> None:
            load(*own)
            weights.extend(math.prod(spec.shape) for spec in weight_specs_of(own[at].layers))

        return loading

    def allocated(*own: Any) -> KVCache:
        caches.append(allocate(*own))
        return caches[-1]

    def with_states(states: hidden_states.ModelStates, *own: int) -> None:
        allocate_states(states, *own)
        caches.append(KVCache((states.states.blocks,)))

    monkeypatch.setattr(worker, "load_weights", noting(read, 3))
    monkeypatch.setattr(hidden_states, "load_fusion", noting(fuse, 2))
    monkeypatch.setattr(worker_parts, "allocate_kv_cache", allocated)
    monkeypatch.setattr(hidden_states.ModelStates, "allocate", with_states)
    limits: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 24, "max_num_seqs": 4}
    LLM(str(model), device="cpu", skip_tokenizer_init=True, speculative_config=asked, **limits).close()
    flags = "--gpu=cpu", "--formats=checkpoint", "--tensor-parallel-sizes=1", "--input-len=32", "--output-len=32"
    (best,) = plan(tmp_path, *flags, "--speculative-config", json.dumps(asked), model=str(model))["candidates"]
    assert best["bytes"]["weights"] == sum(weights) * caches[0].tensors[0].element_size()
    blocks = best["kv_tokens"] // 16 + 1
    assert best["bytes"]["kv_cache"] / blocks == sum(tensor.nbytes for each in caches for tensor in each.tensors) / 25


def test_drafts_on_a_gpu_leave_less_for_the_cache(tmp_path: Path) -> None:
    """By the draft model's weights, and by the largest steps of both."""
    model, drafter = (str(DIRECTORY / name) for name in ("qwen3-30b-a3b", "qwen3-0.6b"))
    asked = json.dumps({"model": drafter, "num_speculative_tokens": 3})
    flags = "--gpu=h200", "--formats=checkpoint", "--tensor-parallel-sizes=1"
    (plain,) = plan(tmp_path, *flags, model=model)["candidates"]
    (drafting,) = plan(tmp_path, *flags, "--speculative-config", asked, model=model)["candidates"]
    before, after = plain["bytes"], drafting["bytes"]
    weights = read_spec(drafter).weight_bytes("bfloat16")
    of_verifying = 3 * 512 * 151_936 * (2 + 8)
    assert after["weights"] - before["weights"] == weights
    assert after["activations"] - before["activations"] - of_verifying > 512 * 151_936 * (2 + 8)
    left = before["kv_cache"] - weights - (after["activations"] - before["activations"])
    assert after["kv_cache"] == pytest.approx(left, rel=1e-4)
    of_token = sum(read_spec(name).kv_bytes_per_token("bfloat16") for name in (model, drafter))
    assert drafting["kv_tokens"] == pytest.approx(left / of_token, rel=1e-3)


def test_host_memory_keeps_prefixes_and_says_whether_loading_pays(tmp_path: Path) -> None:
    flags = "--gpu=h200", "--formats=checkpoint", "--tensor-parallel-sizes=1", "--input-len=8000", "--output-len=200"
    (best,) = plan(tmp_path, *flags, "--kv-offloading-size=64")["candidates"]
    assert best["host_prefixes"]["tokens"] == 64 * 2**30 // 131_072
    assert best["host_prefixes"]["load_ms"] == pytest.approx(8_000 * 131_072 / 40e9 * 1e3)
    assert best["host_prefixes"]["compute_ms"] > 5 * best["host_prefixes"]["load_ms"]
    (without,) = plan(tmp_path, *flags)["candidates"]
    assert without["host_prefixes"] is None


def test_what_is_recommended_keeps_the_targets_and_more_at_a_time_would_not(tmp_path: Path) -> None:
    best = plan(tmp_path, "--gpu=h200", "--target-tpot=12", "--target-ttft=400")["candidates"][0]
    assert best["best"]["tpot_ms"] <= 12
    slower = best["by_batch"][-1]
    assert slower["batch"] > best["best"]["batch"]
    assert slower["tpot_ms"] > 12
    assert "TPOT" in best["reason"]


def test_targets_out_of_reach_are_said_to_be(tmp_path: Path) -> None:
    found = plan(tmp_path, "--gpu=l4", "--formats=checkpoint", "--target-tpot=1", code=1)
    assert {candidate["best"] for candidate in found["candidates"]} == {None}
    assert all("more than 1" in candidate["reason"] for candidate in found["candidates"])


def test_the_cheapest_comes_first_and_its_cost_is_its_price_by_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("h200: 3.6\nl4: 7200\n")
    flags = ["--gpu=l4,h200", "--tensor-parallel-sizes=1,2", "--rate=100", f"--prices={tmp_path / 'prices.yaml'}"]
    found = plan(tmp_path, *flags)["candidates"]
    costs = [each["cost_per_million_output_tokens"] for each in found if each["best"]]
    assert costs == sorted(costs)
    best = found[0]
    assert best["device"] == "h200"
    assert costs[0] == pytest.approx(
        3.6 * best["tensor_parallel_size"] / 3600 / best["best"]["output_tokens_per_s"] * 1e6
    )
    replicas = best["devices_for_rate"] / best["tensor_parallel_size"]
    assert (replicas - 1) * best["best"]["requests_per_s"] < 100 <= replicas * best["best"]["requests_per_s"]


def test_a_model_that_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    found = plan(tmp_path, "--gpu=4090", model=str(DIRECTORY / "qwen3-30b-a3b"))
    reasons = {(each["format"], each["tensor_parallel_size"]): each["reason"] for each in found["candidates"]}
    assert "weights take 56.87 GiB" in reasons["checkpoint", 1]
    fits = {(row["format"]): row["fits"] for row in found["memory"]}
    assert fits["checkpoint"]["2048"] == 0 < fits["w4a16"]["2048"]


def test_longer_sequences_fit_less_often(tmp_path: Path) -> None:
    for row in plan(tmp_path, "--gpu=h200", "--formats=checkpoint,fp8")["memory"]:
        counts = list(row["fits"].values())
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[-1] > 0


def test_a_trace_gives_lengths_and_rate_and_is_simulated(tmp_path: Path) -> None:
    lines = [{"timestamp": 100 * i, "input_length": 100 + 20 * (i % 11), "output_length": 20} for i in range(31)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = plan(tmp_path, "--gpu=h200", f"--trace={tmp_path / 'trace.jsonl'}", "--picture", str(tmp_path / "p.svg"))
    assert found["output_len"] == 20
    assert found["request_rate"] == pytest.approx(10)
    assert found["simulated"]["completed"] == 31
    assert 0 < found["simulated"]["p50_ttft_ms"] < 100
    assert "<svg" in (tmp_path / "p.svg").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu=h900"], "--gpu h900 is not known"),
        (["--formats=int3"], "'int3'"),
        (["--tensor-parallel-sizes=0"], "numbers from 1 on"),
        (["--input-len=0"], "--input-len must be above 0"),
        (["--input-len=200000"], "longer than the 131,072"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(LLAMA), *flags])
    assert end.value.code not in (0, 1)
    assert words in capsys.readouterr().err


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    config = {"architectures": ["BertModel"], "max_position_embeddings": 512, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(TINY | config))
    return str(tmp_path)


def test_encoders_are_planned_for_by_full_steps_and_hold_nothing_behind_them(tmp_path: Path, encoder: str) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("h200: 3.6\n")
    flags = ("--gpu=h200", "--formats=checkpoint", "--tensor-parallel-sizes=1", "--input-len=100", "--prices")
    (best,) = plan(tmp_path, *flags, str(prices), model=encoder)["candidates"]
    gpu = Gpu("NVIDIA H200", (9, 0), 143_771 * 2**20, 143_771 * 2**20)
    config = Config().with_values(model=encoder, skip_tokenizer_init=True, pooler_config={"pooling_type": "CLS"})
    served = resolve(config.with_values(max_model_len=100), Machine(2**37, fast_bfloat16=True, gpu=gpu)).memory
    assert best["footprint"]["weights"] == served.footprint.weights
    assert best["footprint"]["activations"] == served.footprint.activations
    assert best["footprint"]["kv_cache"] == served.footprint.kv_cache < 2**28
    assert best["texts"] == 8192 // 100
    assert best["tokens_per_s"] == pytest.approx(100 * best["texts_per_s"])
    assert best["texts_per_s"] == pytest.approx(1e3 * best["texts"] / best["step_ms"])
    assert best["price"] == pytest.approx(3.6 / 3600 * 1e6 / best["tokens_per_s"])


def test_embedding_models_of_decoders_are_planned_for_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_tiny(tmp_path, "Qwen3ForCausalLM", head_dim=16)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    (made / "modules.json").write_text(
        json.dumps([{"idx": n, "path": path, "type": f"sentence_transformers.models.{name}"}
                    for n, (name, path) in enumerate(modules)])
    )  # fmt: skip
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    flags = ("--gpu=h200", "--formats=checkpoint", "--tensor-parallel-sizes=1")
    assert plan(tmp_path, *flags, "--input-len=100", model=str(made))["candidates"][0]["texts"] == 81
    (made / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    found = plan(tmp_path, *flags, model=str(made))
    assert (found["input_len"], found["candidates"][0]["texts"]) == (64, 128), (
        "texts are no longer than the model takes"
    )
    with pytest.raises(SystemExit):
        main(["plan", str(made), *flags, "--input-len=65"])
    assert "longer than the 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--target-tpot=3"], "leave --target-tpot out"), (["--input-len=513"], "longer than the 512")],
)
def test_plans_of_encoders_have_no_tokens_one_after_another(
    flags: list[str], words: str, encoder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", encoder, *flags])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["h200: -1", "h900: 2", "[1, 2]", "h200: cheap", "{"])
def test_prices_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(ConfigError, match="--prices"):
        read_prices(str(tmp_path / "prices.yaml"))


def test_a_model_is_found_here_or_not_at_all() -> None:
    assert find_model(str(LLAMA)) == find_model(str(LLAMA / "config.json")) == LLAMA
    assert len(read_spec(find_model("quill")).layers) == 8
    for name in ("nobody/has-this-model", "not a name"):
        with pytest.raises(ModelNotFoundError, match=r"config\.json"):
            find_model(name)


def test_a_plan_loads_no_tensor_library() -> None:
    code = "import sys, quire.tools.sizing.command; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240).stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "mib", "word"),
    [
        ("NVIDIA H200", 143_771, "h200"),
        ("NVIDIA H100 80GB HBM3", 81_559, "h100"),
        ("NVIDIA H100 PCIe", 81_559, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "a100"),
        ("NVIDIA A100-PCIE-40GB", 40_960, "a100-40gb"),
        ("NVIDIA L4", 23_034, "l4"),
        ("NVIDIA L40S", 46_068, "l40s"),
        ("NVIDIA GeForce RTX 4090", 24_564, "4090"),
        ("NVIDIA T4", 15_360, None),
    ],
)
def test_a_machines_gpu_is_found_in_the_table(name: str, mib: int, word: str | None) -> None:
    assert word_of(name, mib * 2**20) == word


def test_a_plan_is_for_this_machine_and_shows_ten_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81_559 * 2**20, 81_559 * 2**20)
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(2**36, True, gpu, "", True))
    assert {each["device"] for each in plan(tmp_path)["candidates"]} == {"h100"}
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(2**36, True, None, "", True))
    assert {each["device"] for each in plan(tmp_path)["candidates"]} == {"cpu"}
    capsys.readouterr()
    found = plan(tmp_path, "--gpu=all")["candidates"]
    table = capsys.readouterr().out.partition("the best within the targets first:")[2].partition("…")
    assert len(table[0].split("\n")) == 13  # with a head, and a line break at each end
    assert table[2].startswith(f" {len(found) - 10} more")
