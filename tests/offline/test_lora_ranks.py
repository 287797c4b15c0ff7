"""Adapters of an engine whose ranks are processes: they come, are replaced and go while it serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, LoRARequest
from quire.errors import EngineDeadError, RequestError
from quire.foundation.messages.from_engine import Done
from quire.foundation.messages.to_engine import Control
from quire.runtime.executor.multi_rank_executor import MultiRankExecutor
from tests.checkpoints import make_llama
from tests.lora.adapter_files import write
from tests.offline.test_lora import KINDS, Stage, random_prompts, replace_amid_load

pytestmark = pytest.mark.long("many cards")
OWN = {name: KINDS[name] for name in ("all", "attention", "q and v", "down")}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """With two slots for four adapters."""
    directory = tmp_path_factory.mktemp("lora")
    model = make_llama(directory / "model", tokenizer=False)
    stage = Stage(directory, model, OWN, max_loras=2, max_lora_rank=16, tensor_parallel_size=2)
    yield stage
    stage.llm.close()


def test_adapters_come_go_and_are_replaced_while_two_ranks_serve(stage: Stage, tmp_path: Path) -> None:
    names = [*OWN, None, "all"]
    prompts = random_prompts(1, [5, 17, 33, 8, 21, 40])
    stage.check(prompts, names, 12)
    replace_amid_load(stage, stage.llm, tmp_path)
    with pytest.raises(RequestError, match=r"broken or cut short") as refused:
        stage.llm.generate("x", lora_request=LoRARequest("wrong", 1, str(write(tmp_path / "wrong", b"broken"))))
    assert "Rank" not in refused.value.message
    client = stage.llm._local.client
    for number, error in ((1, ""), (2, "There is no adapter 'hot'.")):
        client.send(Control(number, "unload_adapter", {"name": "hot"}))
        while not isinstance(done := client.receive(1), Done):
            pass
        assert done.error == error
    stage.check(prompts, names, 12)


def test_a_rank_that_dies_while_adapters_are_loaded_is_named(stage: Stage) -> None:
    with LLM(
        str(stage.model), dtype="float32", device="cpu", enable_lora=True, skip_tokenizer_init=True,
        num_gpu_blocks_override=16, max_model_len="auto", tensor_parallel_size=2,
    ) as llm:  # fmt: skip
        executor = llm._engine._core._executor
        assert isinstance(executor, MultiRankExecutor)
        assert executor._ranks is not None
        os.kill(executor._ranks._children[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 \(process \d+\) died: .*SIGKILL"):
            stage.generate(random_prompts(2, [9]), ["all"], llm, max_tokens=4)
