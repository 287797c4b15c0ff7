"""Files of prompts: what is read, what is refused, and when an answer is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.tools.quant_check.continuations import Question, percent_right, read_passages, read_questions


def file_of(tmp_path: Path, *lines: Any) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_texts_token_ids_and_conversations_are_read(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "a", "answer": "b"}, "", {"prompt": [1, 2]}, {"messages": messages, "answer": ["c", "d"]}]
    text, tokens, chat = read_questions(file_of(tmp_path, *lines))
    assert (text.prompt, text.answers, text.needs_text) == ("a", ("b",), True)
    assert (tokens.prompt, tokens.answers, tokens.needs_text) == ([1, 2], (), False)
    assert (chat.messages, chat.answers, chat.needs_text) == (messages, ("c", "d"), True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON object"),
        ("[]", '"prompt" or "messages"'),
        ({"answer": "a"}, '"prompt" or "messages"'),
        ({"prompt": "a", "messages": []}, '"prompt" or "messages"'),
        ({"prompt": "a", "answers": "b"}, '"answers" is not one of'),
        ({"prompt": ""}, "neither text nor a list of token ids"),
        ({"prompt": []}, "neither text nor a list of token ids"),
        ({"prompt": [1, True]}, "neither text nor a list of token ids"),
        ({"prompt": [1.5]}, "neither text nor a list of token ids"),
        ({"messages": "Hi"}, "no list of objects"),
        ({"messages": []}, "no list of objects"),
        ({"prompt": "a", "answer": 42}, "neither text nor a list of texts"),
        ({"prompt": "a", "answer": []}, "neither text nor a list of texts"),
        ({"prompt": "a", "answer": "?!"}, "neither text nor a list of texts"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2") as raised:
        read_questions(file_of(tmp_path, {"prompt": "a"}, line))
    assert message in raised.value.message


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match="has no prompts"):
        read_questions(file_of(tmp_path, "", "  "))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(str(tmp_path / "binary"))


@pytest.mark.parametrize(
    ("answers", "text", "right"),
    [
        (["42"], "17 + 25 = 42.", True),
        (["42"], "17 + 25 = 420.", False),
        (["42"], "42.5", False),
        (["3.14"], "It is 3.14, about.", True),
        (["Paris"], "the capital is paris!", True),
        (["new york"], "New York City", True),
        (["new york"], "york new", False),
        (["cat", "dog"], "A dog.", True),
        (["Ja"], "Jana", False),
    ],
)
def test_an_answer_is_right_if_its_words_stand_in_the_text(answers: list[str], text: str, right: bool) -> None:
    assert Question("a", None, tuple(answers)).is_answered_by(text) == right


def test_only_questions_with_answers_count() -> None:
    questions = [Question("a", None, answers) for answers in (("1",), (), ("2",), ("3",), ("4",))]
    assert percent_right(questions, ["1", "5", "2", "9", "9"]) == 50


def test_built_in_passages_are_whole() -> None:
    passages = read_passages()
    assert len(passages) == 10
    assert any(passage.startswith("def ") and "assert " in passage for passage in passages)
    assert all(len(passage) > 100 for passage in passages)
