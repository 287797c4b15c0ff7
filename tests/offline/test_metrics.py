"""`LLM.get_metrics`: what was counted, under vLLM's names and types."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Counter, Gauge, Histogram
from quire.errors import ConfigError
from tests.checkpoints import make_llama


def test_metrics_count_what_was_generated(tmp_path: Path) -> None:
    directory = make_llama(tmp_path / "model")
    with LLM(str(directory), dtype="float32", max_model_len=128, disable_log_stats=False) as llm:
        params = SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True)
        outputs = llm.generate([[5] * 20, [7] * 30], params, use_tqdm=False)
        stopping = llm.generate([[5] * 20], SamplingParams(seed=2, max_tokens=9, stop=[" ", "a", "e", "t", "<"]))
        metrics = {(metric.name, metric.labels.get("finished_reason")): metric for metric in llm.get_metrics()}
    generated = sum(len(choice.token_ids) for output in (*outputs, *stopping) for choice in output.outputs)
    ended = [choice.finish_reason for output in (*outputs, *stopping) for choice in output.outputs]
    tokens = metrics["vllm:generation_tokens", None]
    assert isinstance(tokens, Counter)
    assert tokens.value >= generated  # a stop string cuts off what was generated
    assert tokens.value - generated <= 9
    prompts = metrics["vllm:prompt_tokens", None]
    assert isinstance(prompts, Counter)
    assert prompts.value == 2 * 20 + 2 * 30 + 20
    for reason in ("length", "stop"):
        success = metrics["vllm:request_success", reason]
        assert isinstance(success, Counter)
        assert success.value == ended.count(reason)
    running = metrics["vllm:num_requests_running", None]
    assert isinstance(running, Gauge)
    assert running.value == 0
    lengths = metrics["vllm:request_generation_tokens", None]
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum, lengths.buckets["+Inf"]) == (5, tokens.value, 5)
    assert lengths.labels == {"model_name": str(directory), "engine": "0"}
    steps = metrics["vllm:iteration_tokens_total", None]
    assert isinstance(steps, Histogram)
    assert steps.count > 5


def test_without_statistics_there_are_none(tmp_path: Path) -> None:
    with (
        LLM(str(make_llama(tmp_path / "model")), dtype="float32", max_model_len=128) as llm,
        pytest.raises(ConfigError, match="disable_log_stats=False"),
    ):
        llm.get_metrics()
