"""The commands of the guides that people follow, typed as they stand, with `quire` for `vllm` and a tiny checkpoint for
the model: each runs and does what it says, or is refused by the name of the flag that comes later.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.cli.flags import parse_config
from quire.errors import ConfigError, ModelNotFoundError
from tests.checkpoints import make_llama

SERVE = (
    "python -m quire.entrypoints.openai.api_server --model M",
    "quire serve M",
    "quire serve --model M",
)

FLAGS = {
    # what the guides add to `serve`                       what is said, or a setting that it changes
    "--enable-chunked-prefill --max-num-batched-tokens 2048": "max_num_batched_tokens=2048",
    "--max-model-len 32768 --max-num-seqs 256 --max-num-batched-tokens 32768": "max_model_len=32768",
    "--dtype auto --host 0.0.0.0 --port 8000 --api-key your-secret-key": "api_key=('your-secret-key',)",
    "--tensor-parallel-size 1 --pipeline-parallel-size 1": "pipeline_parallel_size=1",
    "--enable-lora --lora-modules a=/path/to/a b=/path/to/b --max-loras 3 --max-lora-rank 64": "max_loras=3",
    "--tensor-parallel-size 4": "tensor_parallel_size=4",
    "--tensor-parallel-size 8 --pipeline-parallel-size 1": "tensor_parallel_size=8",
    "--tensor-parallel-size 4 --pipeline-parallel-size 2": "tensor_parallel_size=4, pipeline_parallel_size=2",
    "--max-num-seqs 32 --max-model-len 8192 --num-scheduler-steps 1": "--num-scheduler-steps has no effect",
    "--max-num-seqs 16 --max-model-len 131072 --max-num-batched-tokens 4096": "max_num_seqs=16",
    "--gpu-memory-utilization 0.95 --max-num-seqs 512 --max-model-len 4096 --enable-prefix-caching"
    " --enable-chunked-prefill": "max_num_seqs=512",
    "--gpu-memory-utilization 0.80 --max-model-len 4096 --max-num-seqs 64": "max_num_seqs=64",
    "--enable-prefix-caching": "enable_prefix_caching=True",
    "--swap-space 16": "swap_space=16.0",
    "--preemption-mode recompute": "preemption_mode='recompute'",
    "--block-size 16": "block_size=16",
    "--enforce-eager": "enforce_eager=True",
    "--load-format auto": "load_format='auto'",
    "--kv-cache-dtype=fp8": "kv_cache_dtype='fp8'",
    "--quantization awq": "quantization='awq'",
    "--quantization fp8": "quantization='fp8'",
    "--quantization gguf --gguf-file llama-2-70b.Q4_K_M.gguf": "gguf_file='llama-2-70b.Q4_K_M.gguf'",
    "--speculative-model S --num-speculative-tokens 5": "speculative_model='S'",
    "--speculative-draft-tensor-parallel-size 1": "--speculative-draft-tensor-parallel-size has no effect",
    "--enable-expert-parallel": "enable_expert_parallel=True",
    "--disable-log-requests": "--disable-log-requests has no effect",
}

METRICS = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc", "vllm:cpu_cache_usage_perc",
    "vllm:avg_prompt_throughput_toks_per_s", "vllm:avg_generation_throughput_toks_per_s",
    "vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds", "vllm:time_per_output_token_seconds",
    "vllm:num_preemptions_total",
)  # fmt: skip
"""What the guides' dashboards and alerts read."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama") / "model", layers=1)


def arguments(command: str, model: Path) -> list[str]:
    """The words of a command, after its program."""
    words = shlex.split(re.sub(r"\bM\b", str(model), command))
    return words[words.index("serve") + 1 :] if "serve" in words else words[3:]


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_of_the_guides_do_what_they_say(flags: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in SERVE:
        config = parse_config(arguments(f"{command} {flags}", model), "quire serve", "")
        assert config.model.model == str(model)
        assert FLAGS[flags] in capsys.readouterr().err + repr(config)


@contextmanager
def started(log: Path, *command: str) -> Iterator[str]:
    """A server's address, once it says it; it is asked to end afterwards, and ends well."""
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            deadline = time.monotonic() + 180
            while not (said := re.search(r"OpenAI clients\s+http://localhost(:\d+)/v1", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield f"http://127.0.0.1{said[1]}"
        finally:
            process.terminate()
        assert process.wait(120) == 0


def test_the_api_server_and_the_benchmarks_of_the_guides_run(model: Path, tmp_path: Path) -> None:
    """Only the port, the lengths and the counts are smaller than in the guides."""
    log = tmp_path / "log"
    command = [
        sys.executable, "-m", "quire.entrypoints.openai.api_server", "--model", str(model), "--port", "0",
        "--max-num-seqs", "32", "--max-model-len", "256", "--enable-chunked-prefill", "--max-num-batched-tokens", "64",
        "--num-scheduler-steps", "1",
    ]  # fmt: skip
    with started(log, *command) as url:
        assert log.read_text().count("--num-scheduler-steps has no effect") == 1
        assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"] == str(model)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200  # as probes ask
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        assert [name for name in METRICS if f"\n{name}" not in metrics] == []
        routed = {"model": str(model), "messages": [{"role": "user", "content": "one two"}], "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/chat/completions", json=routed, timeout=120.0)  # as the guide's router sends it
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
        body = {"model": str(model), "prompt": "one two", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 3
        bench = ["bench", "serve", "--base-url", url, "--num-prompts", "6", "--input-len", "10", "--output-len", "4"]
        assert re.search(r"Successful requests +6\n", quire("quire.cli.main", *bench))
        assert "Mean TTFT" in quire("quire.cli.main", *bench, "--backend", "openai-chat", "--request-rate", "100")


def quire(module: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, "-m", module, *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_throughput_benchmark_of_the_guides_runs(model: Path) -> None:
    flags = ["--model", str(model), "--input-len", "51", "--output-len", "12", "--num-prompts", "10"]
    found = re.search(
        r"Throughput: ([\d.]+) requests/s, ([\d.]+) total tokens/s, ([\d.]+) output tokens/s",
        quire("quire.benchmark_throughput", *flags),
    )
    assert found
    requests, total, output = map(float, found.groups())
    assert total == pytest.approx(requests * 63, rel=0.02)
    assert output == pytest.approx(requests * 12, rel=0.02)


def test_the_latency_benchmark_of_the_guides_runs(model: Path) -> None:
    flags = ["--model", str(model), "--input-len", "51", "--output-len", "12", "--batch-size", "1"]
    said = quire("quire.benchmark_latency", *flags, "--num-iters-warmup", "1", "--num-iters", "3")
    assert re.search(r"Avg latency: [\d.]+ seconds", said)


def test_llm_of_the_guides(model: Path) -> None:
    with LLM(model=str(model), max_num_batched_tokens=64, max_model_len=128) as llm:
        (output,) = llm.generate(["one two three"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4))
    assert len(output.outputs[0].token_ids) <= 4
    for settings, name in (
        ({"enable_expert_parallel": True}, "enable-expert-parallel"),
        ({"speculative_model": "small-draft-model", "num_speculative_tokens": 5}, "small-draft-model"),
        ({"quantization": "awq"}, "quantization"),
    ):
        with pytest.raises((ConfigError, ModelNotFoundError), match=name):
            LLM(model=str(model), **settings)


def test_random_weights_on_a_directory_with_a_config_alone(model: Path, tmp_path: Path) -> None:
    """As engines are compared offline: token ids in, token ids out, nothing but config.json there."""
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with LLM(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=64) as llm:
        fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=length, min_tokens=length, **fixed) for length in (3, 5)]
        prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9]}]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert [output.outputs[0].text for output in outputs] == ["", ""]
