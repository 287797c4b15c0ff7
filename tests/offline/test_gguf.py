"""`LLM` on GGUF files of the built-in model: the answers of the same weights dense, in fp32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, builtin
from quire.errors import ConfigError
from tests.gguf import made

PROMPTS = ["The capital of France is", "def add(a, b):\n", "Water boils at", "Once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
MIXED = {"": "Q4_0", "down_proj": "Q5_1", "v_proj": "Q8_0", "embed": "Q8_0", "o_proj": "Q5_0"}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from quire.compute.kernels.cpu.library import library

    library()  # from the usual cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def quill(place: Path, types: dict[str, str] | str) -> tuple[Path, Path]:
    """The model as a GGUF file, and the directory with the same weights dense."""
    dense = place / "dense"
    shutil.copytree(builtin.path("quill"), dense)
    metadata = {"tokenizer.ggml.pre": "qwen2"}

    return made.make_gguf(dense, place / "files" / "quill-Q4_X.gguf", types, metadata=metadata, random=False), dense


@pytest.mark.parametrize("types", ["Q8_0", MIXED])
def test_answers_are_those_of_the_same_weights_dense(types: Any, tmp_path: Path) -> None:
    file, dense = quill(tmp_path, types)
    with LLM(str(dense), **SETTINGS) as llm:
        expected = llm.generate(PROMPTS, GREEDY)
        chat = llm.chat([{"role": "user", "content": "Say hello."}], GREEDY)[0].outputs[0].text
    with LLM(f"{file.parent}:Q4_X", quantization="gguf", load_format="gguf", **SETTINGS) as llm:
        answers = llm.generate(PROMPTS, GREEDY)
        assert [a.prompt_token_ids for a in answers] == [e.prompt_token_ids for e in expected]
        assert [a.outputs[0].token_ids for a in answers] == [e.outputs[0].token_ids for e in expected]
        assert [a.outputs[0].text for a in answers] == [e.outputs[0].text for e in expected]
        assert llm.chat([{"role": "user", "content": "Say hello."}], GREEDY)[0].outputs[0].text == chat


def test_dummy_weights_are_refused(tmp_path: Path) -> None:
    file, _ = quill(tmp_path, "Q8_0")
    with pytest.raises(ConfigError, match="load-format dummy"):
        LLM(str(file), load_format="dummy", **SETTINGS)
