"""The scheduler is built with the device's limits."""

from __future__ import annotations

import json
from pathlib import Path

from quire.engine.build import ModelRuntimeInfo, build_scheduler
from quire.foundation.clock import SystemClock
from quire.foundation.messages.workers import DeviceLimits, Result
from quire.models.spec import read_spec
from quire.planning.costmodel.hardware import Hardware
from quire.planning.costmodel.roofline import Roofline
from tests.engine.harness import add, config

MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip


def test_prefill_beside_decode_has_the_step_sizes_of_the_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    hardware = Hardware(flops=30e9, bandwidth=1e9, host_bandwidth=1e9, overhead_ms=0.1)
    cost = Roofline(read_spec(tmp_path), "bfloat16", hardware, block_size=16)
    assert 30 < cost.free_tokens < 48
    device_limits = DeviceLimits(num_blocks=64, vocab_size=512, step_sizes=[(24, 8), (48, 8), (64, 8)])
    scheduler = build_scheduler(config(), device_limits, ModelRuntimeInfo(cost=cost), SystemClock())
    scheduler.add(add(0, [1], 50))
    scheduler.plan()
    scheduler.process_result(Result(1, [1], [7]))
    scheduler.add(add(1, [2] * 100, 1))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.counts == [1, 23]
