"""Where nothing is found that could be drafted, an engine on a CPU stops asking, and asks again when text repeats."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.metrics.reader import Counter
from quire.foundation.messages.workers import Plan, Result
from quire.runtime.worker.worker import Worker
from tests.checkpoints import VOCAB_SIZE, make_llama

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 4}
LIMITS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 2, "num_gpu_blocks_override": 80}


def test_plans_allow_none_until_text_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []
    execute = Worker.execute

    def noting(self: Worker, plan: Plan, *others: Any) -> Result:
        allowed.append(any(plan.drafts))
        return execute(self, plan, *others)

    monkeypatch.setattr(Worker, "execute", noting)
    draw = random.Random(1)
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(20)]
    checkpoint = make_llama(tmp_path / "model")

    def drafts() -> float:
        return next(m.value for m in llm.get_metrics() if isinstance(m, Counter) and m.name.endswith("num_drafts"))

    def run(**asked: Any) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False, **asked)
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)

    with LLM(str(checkpoint), speculative_config=NGRAM, disable_log_stats=False, **LIMITS) as llm:
        run(temperature=1.5, seed=1)
        assert sum(allowed) < 0.2 * len(allowed)
        assert drafts() < 20
        run(temperature=0, logit_bias={7: 100.0})
        assert drafts() > 20
