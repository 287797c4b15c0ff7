"""Tokenizers with more tokens than the model's embedding has rows, and with fewer: no request is a server's error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.api.server import Server, running
from tests.checkpoints import VOCAB_SIZE, write_tokenizer

BEYOND, THINK, END = "<image_soft_token>", "<think>", "</think>"
FEWER = VOCAB_SIZE
"""Rows of the model."""
MORE = VOCAB_SIZE + 64


def with_tokens(directory: Path, *texts: str) -> Tokenizer:
    write_tokenizer(directory)
    made = Tokenizer.from_file(str(directory / "tokenizer.json"))
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    made.save(str(directory / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose tokenizer has tokens that it does not."""
    directory = tmp_path_factory.mktemp("small")
    made = with_tokens(directory, BEYOND, THINK, END)
    number = made.token_to_id(BEYOND)
    (directory / "config.json").write_text(json.dumps({"vocab_size": FEWER}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, number]}))
    with running(directory, vocab_size=FEWER, masked=True, reasoning_parser="qwen3") as server:
        yield server


def beyond(server: Server) -> int:
    """The id of a token that the model does not have."""
    answer = server.post("/tokenize", {"prompt": BEYOND, "add_special_tokens": False})
    (token,) = answer.json()["tokens"]
    assert token >= FEWER
    return int(token)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
NO_EFFECT: dict[str, dict[str, Any]] = {
    "bad word": {"bad_words": [BEYOND]},
    "bad words": {"bad_words": [f"a {BEYOND}", "zz"]},
    "stop string": {"stop": [BEYOND]},
    "choice": {"structured_outputs": {"choice": [BEYOND, f"{BEYOND}b"]}},
    "regex": {"structured_outputs": {"regex": f"{BEYOND}+"}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object", "properties": {BEYOND: {"const": BEYOND}}, "required": [BEYOND]},
    }}},
    "reasoning": {"thinking_token_budget": 2},
}  # fmt: skip


@pytest.mark.parametrize("fields", NO_EFFECT)
def test_tokens_that_the_model_lacks_do_no_harm(fields: str, small: Server) -> None:
    answer = small.post("/v1/chat/completions", CHAT | {"max_tokens": 250} | NO_EFFECT[fields])
    assert answer.status_code == 200, answer.text


def test_a_grammar_may_have_their_text(small: Server) -> None:
    def text(**fields: Any) -> str:
        answer = small.post("/v1/completions", {"prompt": "a", "max_tokens": 250, **fields})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    choices = [BEYOND, f"{BEYOND}b"]
    assert text(structured_outputs={"choice": choices}) in choices
    schema: dict[str, Any] = {"type": "object", "properties": {BEYOND: {"const": BEYOND}}, "required": [BEYOND]}
    schema["additionalProperties"] = False
    assert json.loads(text(structured_outputs={"json": schema})) == {BEYOND: BEYOND}


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids", "prompt"])
def test_naming_them_by_id_is_refused(name: str, small: Server) -> None:
    number = beyond(small)
    fields = {"logit_bias": {str(number): 5}, "prompt": [5, number]}.get(name, [number])
    answer = small.post("/v1/completions", {"prompt": "a", "max_tokens": 2, name: fields})
    assert answer.status_code == 400
    assert str(number) in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == name


def test_a_text_with_one_is_refused(small: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": f"a{BEYOND}"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": BEYOND}]}),
    ):
        answer = small.post(path, body)
        assert answer.status_code == 400
        assert "outside the vocabulary" in answer.json()["error"]["message"]


def test_tokens_that_the_tokenizer_lacks_have_no_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)

    def padding(history: Any, drawn: int, vocab_size: int) -> int:
        return VOCAB_SIZE + 1 + drawn

    with running(tmp_path, vocab_size=MORE, sample=padding, masked=True) as server:
        asked = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
        for stream in (False, True):
            answer = server.post("/v1/chat/completions", CHAT | asked | {"stream": stream})
            assert answer.status_code == 200, answer.text
        answer = server.post("/v1/chat/completions", CHAT | asked)
        assert answer.json()["choices"][0]["message"]["content"] == ""
        assert answer.json()["choices"][0]["token_ids"] == [VOCAB_SIZE + 1 + n for n in range(4)]
        assert server.post("/detokenize", {"tokens": [VOCAB_SIZE + 1]}).json() == {"prompt": ""}
        grammar = {"structured_outputs": {"choice": ["yes"]}}
        answer = server.post("/v1/chat/completions", CHAT | grammar)
        assert answer.json()["choices"][0]["message"]["content"] == "yes"
        for name, value in (
            ("logit_bias", {str(MORE - 1): 1}),
            ("allowed_token_ids", [MORE - 1]),
            ("stop_token_ids", [MORE - 1]),
        ):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, name: value}).status_code == 200
        assert server.post("/v1/completions", {"prompt": [MORE - 1], "max_tokens": 2}).status_code == 200
