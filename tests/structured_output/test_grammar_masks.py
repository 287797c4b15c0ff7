"""Constrained sequences in a real engine, wherever masks are made: a fake device, the built-in tokenizer."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire.builtin
from quire.engine.structured_output import grammar_compiler
from quire.engine.structured_output.grammar_masks import GrammarMasks
from quire.engine.structured_output.grammars import grammar_of
from quire.engine.structured_output.mask_process import MaskProcess
from quire.engine.structured_output.messages import constraint_of
from quire.errors import GenerationError
from quire.foundation.messages.to_engine import Add
from quire.structured_outputs_params import StructuredOutputsParams
from quire.text.output_parsers.call_grammar import reasoning_in_front
from quire.text.output_parsers.formats import Turn
from quire.text.tokenizer import load_tokenizer
from tests.engine.harness import Engine, add, alone
from tests.executor.fake import FakeExecutor

QUILL = Path(quire.builtin.__file__).parent / "quill"
VOCAB = 4096
TOKENIZER = load_tokenizer(QUILL)
EOS = TOKENIZER.eos_id
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


GIVEN = str(QUILL), str(QUILL), VOCAB, 8


@pytest.fixture(params=[False, True], ids=["the engine's process", "beside it"])
def source(request: pytest.FixtureRequest) -> Iterator[GrammarMasks]:
    source = GrammarMasks(*GIVEN, beside=request.param)
    yield source
    source.close()


@pytest.fixture
def own() -> GrammarMasks:
    return GrammarMasks(*GIVEN, beside=False)


@pytest.fixture
def beside() -> Iterator[GrammarMasks]:
    source = GrammarMasks(*GIVEN, beside=True)
    yield source
    source.close()


def kill_process(source: GrammarMasks) -> None:
    """Kill the process that follows grammars, and wait until it is gone."""
    maker = source._maker
    assert isinstance(maker, MaskProcess)
    assert maker._process is not None
    fd = os.pidfd_open(maker._process.pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        select.select([fd], [], [])
    finally:
        os.close(fd)


def constrained(number: int, prompt: list[int], max_tokens: int, *, behind: str = "", **asked: Any) -> Add:
    sampling = {name: asked.pop(name) for name in ("ignore_eos", "min_tokens") if name in asked}
    forks = asked.pop("forks", ())
    message = add(
        number, prompt, max_tokens, stop_ids=[] if sampling.get("ignore_eos") else [EOS or 0], forks=forks, **sampling
    )
    grammar = grammar_of(constraint_of(StructuredOutputsParams(**asked), behind), TOKENIZER.special_tokens)
    return msgspec.structs.replace(message, grammar=grammar)


def engine_of(source: GrammarMasks, blocks: int = 256, max_in_flight: int = 2) -> Engine:
    executor = FakeExecutor(blocks, 8, vocab_size=VOCAB, max_in_flight=max_in_flight)
    return Engine(executor, masker=source, block_size=8)


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode([token for token in tokens if token != EOS])


def run(engine: Engine, adds: list[Add]) -> Any:
    return engine.run(adds, steps=1_000_000)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_every_kind_is_followed_and_others_get_what_they_get_alone(source: GrammarMasks, max_in_flight: int) -> None:
    engine = engine_of(source, max_in_flight=max_in_flight)
    outcome = run(
        engine,
        [
            constrained(1, [5, 6], 60, json=SCHEMA),
            constrained(2, [7], 60, regex="[a-c]{3,9}-[0-9]{2}"),
            add(3, [8, 9], 30),
            constrained(4, [7], 60, choice=["left", "right"]),
        ],
    )
    document = json.loads(text_of(outcome.tokens[1]))
    assert set(document) == {"name", "age"}
    assert re.fullmatch("[a-c]{3,9}-[0-9]{2}", text_of(outcome.tokens[2]))
    assert outcome.tokens[3] == alone([8, 9], 30, vocab_size=VOCAB)
    assert text_of(outcome.tokens[4]) in ("left", "right")
    assert {outcome.ends[number].reason for number in (1, 2, 4)} == {"stop"}
    engine.assert_all_free()


def test_a_preempted_sequence_goes_on_in_its_grammar(source: GrammarMasks) -> None:
    engine = engine_of(source, blocks=12)
    adds = [constrained(number, [number] * 12, 70, regex="[a-z]{60,70}") for number in range(1, 7)]
    outcome = run(engine, adds)
    assert engine.client.counts()["preemptions"] > 0
    for number in range(1, 7):
        assert re.fullmatch("[a-z]{60,70}", text_of(outcome.tokens[number]))
    engine.assert_all_free()


def test_forks_follow_the_grammar_each_for_itself(source: GrammarMasks) -> None:
    engine = engine_of(source)
    outcome = run(engine, [constrained(1, [5, 6, 7], 40, regex="[a-z]{5,9}", forks=(2, 3))])
    for number in (1, 2, 3):
        assert re.fullmatch("[a-z]{5,9}", text_of(outcome.tokens[number]))


def test_a_replay_continues_where_its_tokens_end(source: GrammarMasks) -> None:
    begun = TOKENIZER.encode("left or ri", add_special_tokens=False)
    message = constrained(1, [5, 6, *begun], 40, choice=["left or right", "left or up"])
    message = msgspec.structs.replace(message, prompt_len=2)
    outcome = run(engine_of(source), [message])
    assert text_of([*begun, *outcome.tokens[1]]) == "left or right"


def test_ignore_eos_goes_on_as_far_as_the_grammar_does(source: GrammarMasks) -> None:
    outcome = run(engine_of(source), [constrained(1, [5], 60, regex="[a-z]{1,20}", ignore_eos=True)])
    assert re.fullmatch("[a-z]{20}", text_of(outcome.tokens[1]))
    assert EOS not in outcome.tokens[1]
    assert outcome.ends[1].reason == "stop"


def test_min_tokens_holds_the_end_back_but_not_beyond_the_grammar(source: GrammarMasks) -> None:
    engine = engine_of(source)
    outcome = run(
        engine,
        [
            constrained(1, [5], 60, regex="(a|bc)*", min_tokens=12),
            constrained(2, [6], 60, choice=["yes", "no"], min_tokens=50),
        ],
    )
    assert len(outcome.tokens[1]) >= 12
    assert text_of(outcome.tokens[2]) in ("yes", "no")
    assert outcome.ends[2].reason == "stop"


FORMS: list[dict[str, Any]] = [
    {"choice": ["left", "right"]},
    {"regex": "left|right"},
    {"json": {"enum": ["left", "right"]}},
    {"grammar": 'root ::= "left" | "right"'},
    {"structural_tag": {"format": {"type": "regex", "pattern": "left|right"}}},
    {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"enum": ["left", "right"]}}}},
    {"grammar": "start: /left|right/\n%ignore / /"},
]
SCRIPTS = {
    "opened in the prompt": ("<think>\n", "Hm, so.</think>\n\n", True),
    "opened by the model": ("", "<think>Hm, so.</think>\n", True),
    "not opened": ("", "", False),
    "closed in the prompt": ("<think></think>", "<think>Hm", False),
}
"""How a turn begins in the prompt, what the model says, and whether that is reasoning."""


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(*form))
def test_a_form_may_begin_behind_reasoning(own: GrammarMasks, form: dict[str, Any], script: str) -> None:
    """The tags are text here, since Quill's vocabulary has no tokens for them."""
    prompt, says, reasons = SCRIPTS[script]
    spoken = TOKENIZER.encode(says, add_special_tokens=False)

    def sample(history: Any, drawn: int, vocab: int) -> int:
        return spoken[drawn] if drawn < len(spoken) else 300

    executor = FakeExecutor(256, 8, vocab_size=VOCAB, sample=sample)
    engine = Engine(executor, masker=own, block_size=8)  # type: ignore[arg-type]
    behind = reasoning_in_front("qwen3", Turn(prompt), TOKENIZER.special_tokens)
    text = text_of(run(engine, [constrained(1, [5], 60, behind=behind, **form)]).tokens[1])
    thought, _, answer = text.rpartition("</think>")
    assert answer.strip().strip('"') in ("left", "right"), text
    assert thought == says.partition("</think>")[0] * reasons


def test_the_length_limit_cuts_an_output_that_is_not_complete(source: GrammarMasks) -> None:
    outcome = run(engine_of(source), [constrained(1, [5], 4, regex="[a-z]{200}")])
    assert (outcome.ends[1].reason, len(outcome.tokens[1])) == ("length", 4)


def test_nobody_waits_for_a_request_that_waits_for_its_grammar(source: GrammarMasks) -> None:
    engine = engine_of(source)
    engine.client.send(constrained(1, [5], 20, regex="[a-z]{5}"))  # the process starts: that takes a while
    outcome = engine.run([add(2, [7, 8], 30)], steps=60)
    assert outcome.tokens[2] == alone([7, 8], 30, vocab_size=VOCAB)
    assert 1 not in outcome.tokens
    assert engine.client.counts()["running"] == 0
    run(engine, [constrained(3, [9], 20, regex="[a-z]{5}")])
    while 1 not in engine.outcome.ends:
        engine.step()
    assert re.fullmatch("[a-z]{5}", text_of(outcome.tokens[1]))


def test_an_aborted_request_leaves_nothing_behind(source: GrammarMasks) -> None:
    from quire.foundation.messages.to_engine import Abort

    engine = engine_of(source)
    engine.client.send(constrained(1, [5], 20, regex="[a-z]{5}"))
    engine.step()
    engine.client.send(Abort([1]))
    outcome = run(engine, [constrained(2, [6], 20, regex="[a-z]{5}")])
    assert outcome.ends[1].reason == "abort"
    engine.assert_all_free()


def test_a_grammar_that_does_not_compile_fails_alone(source: GrammarMasks) -> None:
    message = msgspec.structs.replace(constrained(1, [5], 20, regex="a"), grammar="start: nothing")
    outcome = run(engine_of(source), [message, constrained(2, [6], 20, regex="[a-z]{5}")])
    assert outcome.ends[1].reason == "refused"
    assert "unknown name" in outcome.ends[1].message
    assert outcome.ends[2].reason == "stop"


def test_whatever_happens_to_the_compiler_ends_its_sequence_alone(
    own: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_grammar = grammar_compiler.compile_grammar

    def compile_some(tokenizer: Any, grammar: str) -> Any:
        if "unlucky" in grammar:
            raise MemoryError
        return compile_grammar(tokenizer, grammar)

    monkeypatch.setattr(grammar_compiler, "compile_grammar", compile_some)
    adds = [constrained(1, [5], 20, regex="unlucky"), constrained(2, [6], 20, regex="[a-z]{5}")]
    outcome = run(engine_of(own), adds)
    assert (outcome.ends[1].reason, outcome.ends[2].reason) == ("error", "stop")
    assert "could not be compiled" in outcome.ends[1].message


def test_a_grammar_that_is_known_need_not_wait_for_one_that_compiles(
    own: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = constrained(1, [5, 6], 60, json=SCHEMA)
    first = run(engine_of(own), [known])
    may_end, compile_grammar = threading.Event(), grammar_compiler.compile_grammar
    monkeypatch.setattr(
        grammar_compiler, "compile_grammar", lambda *given: (may_end.wait(), compile_grammar(*given))[1]
    )
    engine = engine_of(own)
    engine.client.send(constrained(2, [5], 20, regex="[a-z]{5}"))
    outcome = run(engine, [msgspec.structs.replace(known, id=3)])
    assert outcome.tokens[3] == first.tokens[1]
    assert 2 not in outcome.tokens
    may_end.set()
    while 2 not in outcome.ends:
        engine.step()
    assert re.fullmatch("[a-z]{5}", text_of(outcome.tokens[2]))


def test_a_lost_process_fails_what_it_followed_and_starts_again(beside: GrammarMasks) -> None:
    engine = engine_of(beside)
    engine.client.send(constrained(1, [5], 400, regex="[a-z]{5000}"))
    engine.client.send(add(2, [7], 200))
    while 1 not in engine.outcome.tokens:
        engine.step()
    kill_process(beside)
    outcome = run(engine, [constrained(3, [6], 20, regex="[a-z]{5}")])
    assert outcome.ends[1].reason == "error"
    assert re.fullmatch("[a-z]{5}", text_of(outcome.tokens[3]))
    while 2 not in outcome.ends:
        engine.step()
    assert outcome.tokens[2] == alone([7], 200, vocab_size=VOCAB)


def test_what_was_asked_of_a_lost_process_fails_though_another_runs_by_then(beside: GrammarMasks) -> None:
    def prepare(number: int) -> None:
        beside.prepare(constrained(number, [5], 20, regex="[a-z]{5}"))
        while not (prepared := beside.prepared()):
            time.sleep(0.01)
        assert prepared == [(number, None)]

    prepare(1)
    request: Any = types.SimpleNamespace(id=1, tokens=[5])
    beside.ask([request], {})
    kill_process(beside)
    beside.prepare(constrained(2, [5], 20, regex="[a-z]{5}"))
    (lost,) = beside.bits()
    assert isinstance(lost, GenerationError)
    while not beside.prepared():
        time.sleep(0.01)
    request = types.SimpleNamespace(id=2, tokens=[5])
    beside.ask([request], {})
    assert beside.prepared() == []  # takes what comes, and the answer may
    ((bits,),) = beside.bits()
    assert isinstance(bits, memoryview)
    allowed = {t for t in range(VOCAB) if bits[t // 8] >> t % 8 & 1}
    assert allowed == {t for t in range(VOCAB) if re.fullmatch(b"[a-z]{1,5}", TOKENIZER.token_bytes(t))}
