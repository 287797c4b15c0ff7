"""/v1/decisions by the `openai` client: what the model is asked, and answers from its log probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Decision

from quire.foundation.messages.from_engine import Deltas, End
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.foundation.messages.workers import TokenLogprobs
from quire.serving.api import request_work
from tests.api.openai_types import check, unknown_fields
from tests.api.scripted import READY, ScriptedClient
from tests.api.server import Server, resolved

QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "late", "instructions": "The parcel is late."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which team?"}],
        "choices": [{"value": "billing", "description": "money"}, {"value": True}, {"value": "true"}],
    },
    {"type": "score", "name": "mood", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "wild"}]},
]


def logprob(token: int) -> float:
    """What the model says of a token."""
    return -0.1 * (token % 7) - 2.0


class Decider(ScriptedClient):
    """Answers each prompt with one token, and the log probabilities that it was asked for."""

    def send(self, message: ToEngine) -> None:
        super().send(message)
        if isinstance(message, Add):
            ids = message.sampling.logprob_token_ids or []
            entry = TokenLogprobs(logprob(5), 1, ids, [logprob(token) for token in ids])
            self.say(Deltas([message.id], [1], [5], [entry], [End(message.id, "length")], last_add=message.id))


@pytest.fixture(scope="module")
def decider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Decider]]:
    engine = Decider()
    with Server(resolved(tmp_path_factory.mktemp("model")), lambda: engine) as server:
        engine.say(READY)
        yield server.wait_ready(), engine


def decide(server: Server, **fields: Any) -> Decision:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    raw = client.decisions.with_raw_response.create(**{"model": "tiny", "questions": QUESTIONS, **fields})
    found: Decision = check(Decision, json.loads(raw.http_response.content))
    assert unknown_fields(found) == []
    return found


def label_tokens(server: Server, labels: str) -> list[int]:
    assert server.text.tokenizer is not None
    return [server.text.tokenizer.encode(label)[0] for label in labels]


def shares(server: Server, labels: str) -> list[float]:
    weights = [math.exp(logprob(token)) for token in label_tokens(server, labels)]
    return [weight / sum(weights) for weight in weights]


def test_answers_are_the_probabilities_of_the_labels(decider: tuple[Server, Decider]) -> None:
    server, engine = decider
    before = len(engine.adds)
    found = decide(server, input="The parcel was to come on Monday.")
    late, team, mood = found.answers
    assert late.type == "predicate"
    assert (late.name, late.probability) == ("late", pytest.approx(shares(server, "AB")[0]))
    assert team.type == "choice"
    assert [one.value for one in team.probabilities] == ["billing", True, "true"]
    assert [one.probability for one in team.probabilities] == pytest.approx(shares(server, "ABC"))
    best = max(range(3), key=lambda at: team.probabilities[at].probability)
    assert team.choice == team.probabilities[best].value
    assert team.confidence == pytest.approx(math.exp(max(logprob(token) for token in label_tokens(server, "ABC"))))
    assert team.confidence < team.probabilities[best].probability
    assert mood.type == "score"
    assert mood.score == pytest.approx(shares(server, "01")[1])
    assert [(one.value, one.label) for one in mood.probabilities] == [(0, "calm"), (1, "wild")]
    sent = engine.adds[before:]
    assert [add.sampling.max_tokens for add in sent] == [1, 1, 1]
    assert found.usage.input_tokens == sum(add.prompt_len for add in sent)
    assert found.usage.output_tokens == 3


def test_the_model_reads_the_input_and_the_options(decider: tuple[Server, Decider]) -> None:
    server, engine = decider
    items = [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": [{"type": "input_json", "data": {"parcel": 5}}]},
        {"type": "function_call", "call_id": "c1", "name": "track", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "lost"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Sorry."}]},
    ]
    decide(server, input=items, questions=QUESTIONS[1:2])
    assert server.text.tokenizer is not None
    text = server.text.tokenizer.decode(engine.adds[-1].tokens, skip_special_tokens=False)
    for words in ("system\nBe fair.", 'user\n{"parcel": 5}', "tool\nlost", "assistant\nSorry.", "Which team?"):
        assert words in text
    assert "A: billing (money)\nB: true\nC: true" in text
    assert text.endswith("<|im_start|>assistant\n")
    decide(server, input="It is late.", questions=QUESTIONS[:1])
    text = server.text.tokenizer.decode(engine.adds[-1].tokens, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nIt is late.\n\nIs this statement")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS * 134}, "questions"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": "x" * 60_000}, "input"),
        ({"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{**QUESTIONS[1], "choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
        ({"questions": [{**QUESTIONS[1], "choices": [{"value": str(n)} for n in range(27)]}]}, "questions[0].choices"),
        ({"questions": [{**QUESTIONS[2], "levels": [{"label": str(n)} for n in range(11)]}]}, "questions[0].levels"),
        ({"questions": [{"type": "box", "instructions": "a"}]}, "questions[0]"),
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(decider: tuple[Server, Decider], fields: dict[str, Any], param: str) -> None:
    server, engine = decider
    before = len(engine.adds)
    answer = server.post("/v1/decisions", {"input": "a", "questions": QUESTIONS, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text
    assert len(engine.adds) == before


def test_an_input_that_many_questions_repeat_has_a_limit(
    decider: tuple[Server, Decider], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = decider
    monkeypatch.setattr(request_work, "MAX_TOKENS", 400)
    body = {"model": "tiny", "questions": QUESTIONS, "input": "a " * 100}
    answer = server.post("/v1/decisions", body)
    assert answer.status_code == 400
    assert "send several requests" in answer.json()["error"]["message"]
    monkeypatch.setattr(request_work, "MAX_TOKENS", 100_000)
    assert server.post("/v1/decisions", body).status_code == 200


def test_without_a_chat_template_there_are_none(tmp_path: Path) -> None:
    engine = Decider()
    with Server(resolved(tmp_path, skip_tokenizer_init=True), lambda: engine) as server:
        engine.say(READY)
        server.wait_ready()
        answer = server.post("/v1/decisions", {"input": "a", "questions": QUESTIONS})
        assert (answer.status_code, "--skip-tokenizer-init" in answer.text) == (400, True)
