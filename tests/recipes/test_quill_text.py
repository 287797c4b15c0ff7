"""The shipped tokenizer and chat template say what the recipe trained on."""

from pathlib import Path
from random import Random

import pytest
from quill.chat import Message, render, system_with_tools, tool_call, tool_response
from quill.corpus import IGNORED, Encoder, conversation, documents, pack
from quill.examination import examination
from quill.tokenizer import CHAT_TEMPLATE, CONTEXT, VOCABULARY, train_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from quire import builtin

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather, "now" & later',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(builtin.path("quill"))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(builtin.path("quill") / "tokenizer.json")))


@pytest.mark.parametrize(
    "text",
    ["What is 17 × 23?", "naïve café, 你好 😀", "  two  spaces\n\n\ttab", "def f(x): return x[::-1]", "\x00\x7f"],
)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("90210") == list("90210")


def test_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>", add_special_tokens=False)) == 3


def test_both_models_have_the_same_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (builtin.path("quill") / name).read_bytes() == (builtin.path("quill_draft") / name).read_bytes()


def test_the_shipped_template_is_the_recipe_s(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_the_template_renders_what_was_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = Random(5)
    for _ in range(100):
        messages = conversation(rng)
        chat = [{"role": m.role, "content": m.content} for m in messages]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == render(messages)
        prompt = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        assert prompt == render(messages[:-1], add_generation_prompt=True)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tools_stand_in_the_system_message(tokenizer: PreTrainedTokenizerBase, system: str | None) -> None:
    opening = [{"role": "system", "content": system}] if system else []
    chat = [*opening, {"role": "user", "content": "hi"}]
    expected = render([Message("system", system_with_tools([TOOL], system)), Message("user", "hi")])
    assert tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False) == expected


def test_calls_and_results_of_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    chat = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    expected = [
        Message("user", "weather?"),
        Message("assistant", tool_call("get_weather", {"city": "Oslo"})),
        tool_response("rain"),
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == render(expected)


def test_two_calls_and_two_results(tokenizer: PreTrainedTokenizerBase) -> None:
    calls = [{"function": {"name": name, "arguments": '{"x": 1}'}} for name in "ab"]
    chat = [
        {"role": "user", "content": "do both"},
        {"role": "assistant", "content": "Yes.", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith(
        '<|im_start|>assistant\nYes.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n'
        '{"name": "b", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n1\n'
        "</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_examined_recall_is_long_and_fits(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = [render(s.question, add_generation_prompt=True) for s in examination(400) if s.task == "recall"]
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    assert min(lengths) >= 1500
    assert max(lengths) <= 1950


def test_only_answers_are_targets(encoder: Encoder, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [Message("user", "hi"), Message("assistant", "Hello.")]
    messages = [*turns, Message("user", "bye"), Message("assistant", "Bye.")]
    document = encoder.encode([messages])[0]
    kept = [target for target in document.targets if target != IGNORED]
    assert tokenizer.decode(kept) == "Hello.<|im_end|>Bye.<|im_end|>"
    assert tokenizer.decode(document.tokens) + "\n" == render(messages)


def test_rows_hold_whole_documents(encoder: Encoder) -> None:
    rows = pack(documents(Random(1), encoder), padding=0)
    for _ in range(4):
        tokens, targets, numbers = next(rows)
        assert tokens.shape == (CONTEXT,)
        assert sorted(set(numbers)) == list(range(numbers.max() + 1))
        assert (numbers[1:] >= numbers[:-1]).all()
        begin = encoder.encode([[Message("user", "x"), Message("assistant", "y")]])[0].tokens[0]
        starts = [i for i in range(1, CONTEXT) if numbers[i] != numbers[i - 1]]
        assert all(tokens[i] == begin for i in starts[:-1])
        assert (targets != IGNORED).mean() > 0.02
        assert (numbers == numbers.max()).mean() < 0.5


def test_a_new_tokenizer_can_be_trained(tmp_path: Path) -> None:
    rng = Random(0)
    tokenizer = train_tokenizer(render(conversation(rng)) for _ in range(300))
    text = "Sort 10, 2 and 33."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
