"""Reasoning offline: what `LLM.chat` limits, and where the form of an answer begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.errors import RequestError
from tests.api.speaker import make_special
from tests.checkpoints import make_llama

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not defined %}<think>\n{% endif %}"
    "{% endif %}"
)
MESSAGES = [{"role": "user", "content": "one two"}]
CHOICE = StructuredOutputsParams(choice=["left", "right"])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = make_llama(tmp_path_factory.mktemp("llama") / "model", layers=1)
    make_special(model / "tokenizer.json", ["<think>", "</think>"])
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(str(model), dtype="float32", max_model_len=256, max_num_seqs=8) as llm:
        yield llm


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 1, "skip_special_tokens": False, **options})


@pytest.mark.parametrize("n", [1, 3])
def test_a_budget_ends_the_reasoning(llm: LLM, n: int) -> None:
    end = llm.get_tokenizer().token_id("</think>")
    (output,) = llm.chat(MESSAGES, params(n=n, thinking_token_budget=4, ignore_eos=True), use_tqdm=False)
    for choice in output.outputs:
        assert choice.token_ids.index(end) <= 4
        assert len(choice.token_ids) == 40


def test_the_form_begins_behind_reasoning(llm: LLM) -> None:
    asked = params(structured_outputs=CHOICE, thinking_token_budget=6, n=4)
    (output,) = llm.chat(MESSAGES, asked, use_tqdm=False)
    for choice in output.outputs:
        _, tag, answer = choice.text.partition("</think>")
        assert tag
        assert answer.replace("<|im_end|>", "").strip() in ("left", "right")
        assert choice.finish_reason == "stop"


def test_hints_that_the_template_does_not_read_are_dropped(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    asked = params(max_tokens=1)
    (plain,) = llm.chat(MESSAGES, asked, use_tqdm=False)
    for _ in range(2):
        (hinted,) = llm.chat(MESSAGES, asked, use_tqdm=False, chat_template_kwargs={"thinking_budget": 9})
        assert hinted.prompt == plain.prompt
    assert sum("thinking_budget is ignored" in line for line in caplog.messages) == 1
    with pytest.raises(RequestError, match="'enable_thinkin' is no variable"):
        llm.chat(MESSAGES, asked, use_tqdm=False, chat_template_kwargs={"enable_thinkin": True})


def test_where_the_prompt_opens_no_reasoning_the_model_may(llm: LLM) -> None:
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = params(structured_outputs=CHOICE, thinking_token_budget=6, n=4)
    (output,) = llm.chat(MESSAGES, asked, use_tqdm=False, **options)
    for choice in output.outputs:
        thought, _, answer = choice.text.rpartition("</think>")
        assert thought.startswith("<think>") or not thought
        assert answer.replace("<|im_end|>", "").strip() in ("left", "right")


def test_prompts_that_are_no_conversations(llm: LLM) -> None:
    """The form begins at once; a budget counts where the prompt has opened the reasoning."""
    end = llm.get_tokenizer().token_id("</think>")
    opened, plain, formed = llm.generate(
        ["one<think>\n", "one", "one<think>"],
        [
            params(thinking_token_budget=3, ignore_eos=True),
            params(thinking_token_budget=0, ignore_eos=True, max_tokens=4),
            params(structured_outputs=CHOICE),
        ],
        use_tqdm=False,
    )
    assert opened.outputs[0].token_ids.index(end) <= 3
    assert end not in plain.outputs[0].token_ids
    assert formed.outputs[0].text.replace("<|im_end|>", "") in ("left", "right")


def test_a_model_whose_reasoning_is_not_known_has_no_budget(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", layers=1)
    with (
        LLM(str(model), dtype="float32", max_model_len=64) as other,
        pytest.raises(RequestError, match="thinking_token_budget: how this model reasons is not known"),
    ):
        other.chat(MESSAGES, params(max_tokens=4, thinking_token_budget=1), use_tqdm=False)
