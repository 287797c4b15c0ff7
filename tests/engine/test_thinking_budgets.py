"""Budgets of reasoning: when they end it, by which tokens, and that nothing else changes."""

from __future__ import annotations

import random
import types
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from quire.engine.thinking_budgets import Thinking, ThinkingBudgets
from quire.errors import GenerationError
from quire.foundation.messages.to_engine import Abort, Add, ThinkingBudget
from tests.engine.harness import Engine, HashMasker, add, alone
from tests.executor.fake import FakeExecutor, hash_token

START, END, OTHER_END = 500, 501, 502
VOCAB = 512
OPENED = ThinkingBudget(6, [START], [[END]], opened=True)


def thinking(message: Add, budget: ThinkingBudget = OPENED) -> Add:
    return msgspec.structs.replace(message, thinking=budget)


def engine_of(masker: HashMasker | None = None, **options: Any) -> Engine:
    sample = options.pop("sample", unmarked)
    executor = FakeExecutor(options.pop("blocks", 64), 8, sample=sample, max_in_flight=options.pop("in_flight", 2))
    source: Any = ThinkingBudgets(masker or HashMasker(), VOCAB)
    return Engine(executor, masker=source, block_size=8, drafts=None, **options)


def unmarked(history: Sequence[int], drawn: int, vocab: int) -> int:
    """The fake model, without the tags."""
    return hash_token(history, drawn, vocab) % 500


def limited(prompt: list[int], length: int, budget: int) -> list[int]:
    """What a model that reasons from the beginning says, ended after so many tokens."""
    return alone(prompt, length, sample=lambda history, drawn, vocab: (
        END if drawn == budget else unmarked(history, drawn, vocab)
    ))  # fmt: skip


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("blocks", [64, 9])
def test_reasoning_ends_when_its_budget_is_spent(in_flight: int, blocks: int) -> None:
    engine = engine_of(blocks=blocks, in_flight=in_flight)
    prompts = {number: [number] * (3 * number) for number in range(1, 7)}
    adds = [add(n, p, 25) if n % 3 == 0 else thinking(add(n, p, 25)) for n, p in prompts.items()]
    outcome = engine.run(adds)
    for number, prompt in prompts.items():
        free = alone(prompt, 25, sample=unmarked)
        assert outcome.tokens[number] == (free if number % 3 == 0 else limited(prompt, 25, 6))
    assert (engine.client.counts()["preemptions"] > 0) == (blocks == 9)
    engine.assert_all_free()


def test_each_fork_has_the_budget() -> None:
    engine = engine_of()
    outcome = engine.run([thinking(add(1, [5, 6], 20, forks=(2, 3)))])
    assert [outcome.tokens[number].index(END) for number in (1, 2, 3)] == [6, 6, 6]


@pytest.mark.parametrize("known", [2, 6, 7, 10])
def test_a_replay_counts_what_was_thought_before(known: int) -> None:
    whole = limited([5, 6], 20, 6)
    message = thinking(add(1, [5, 6, *whole[:known]], 20, prompt_len=2))
    assert engine_of().run([message]).tokens[1] == whole[known:]


def test_only_reasoning_counts_and_it_may_end_by_itself() -> None:
    says = [1, START, 2, 3, END, *range(10, 30)]
    engine = engine_of(sample=lambda history, drawn, vocab: says[drawn])
    budget = ThinkingBudget(3, [START], [[END]], opened=False)
    assert engine.run([thinking(add(1, [5], 20), budget)]).tokens[1] == says[:20]
    later = [*range(30, 50), START, *range(50, 60)]  # that is text
    engine = engine_of(sample=lambda history, drawn, vocab: later[drawn])
    assert engine.run([thinking(add(1, [5], 30), budget)]).tokens[1] == later[:30]


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_reasoning_that_the_output_begins_is_counted_from_there(tokens: int) -> None:
    says = [1, START, *range(10, 40)]
    engine = engine_of(sample=lambda history, drawn, vocab: says[drawn])
    found = engine.run([thinking(add(1, [5], 12), ThinkingBudget(tokens, [START], [[END]], opened=False))]).tokens[1]
    assert found == [*says[: 2 + tokens], END, *says[3 + tokens : 12]]


def test_the_end_may_be_several_tokens_or_begin_the_answer() -> None:
    engine = engine_of()
    three = ThinkingBudget(6, [START], [[END, 7, OTHER_END], [OTHER_END, 8]], opened=True)
    tokens = engine.run([thinking(add(1, [5, 6], 20), three)]).tokens[1]
    assert tokens[6:9] == [END, 7, OTHER_END]
    assert tokens[:6] == alone([5, 6], 6, sample=unmarked)
    says = [1, OTHER_END, 8, *range(10, 40)]  # a call, say
    engine = engine_of(sample=lambda history, drawn, vocab: says[drawn])
    assert engine.run([thinking(add(1, [5], 20), three)]).tokens[1] == says[:20]


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [([START, 9], True), ([9, END], False), ([START, 1, END], False), ([START, *range(20)], False), ([9], False)],
)
def test_where_nobody_said_so_the_end_of_the_prompt_tells_whether_it_reasons(prompt: list[int], opens: bool) -> None:
    tokens = engine_of().run([thinking(add(1, prompt, 20), ThinkingBudget(6, [START], [[END]]))]).tokens[1]
    assert tokens == (limited(prompt, 20, 6) if opens else alone(prompt, 20, sample=unmarked))


def test_a_grammar_goes_first() -> None:
    """The end waits until the mask of the other source has it; without that, nothing outside of the mask is sampled."""
    engine, prompt = engine_of(), [5, 6]
    message = thinking(add(1, prompt, 40, extra_args={"masked": True}))
    tokens = engine.run([message]).tokens[1]
    history = [*prompt, *tokens]
    for place in range(2, len(history)):
        mask = HashMasker.mask(history[:place])
        assert mask[history[place] >> 3] >> (history[place] & 7) & 1
    assert END in tokens[6:]
    for place in range(6, tokens.index(END)):
        mask = HashMasker.mask(history[: place + 2])
        assert not mask[END >> 3] >> (END & 7) & 1, "it could have ended here"


def test_reasoning_that_may_come_again_has_one_budget() -> None:
    """As in messages: CHANNEL says that one begins, the token behind it which kind."""
    channel, analysis, final, message = 400, 401, 402, 403
    budget = ThinkingBudget(4, [channel, analysis, message], [[END, START]], again=True, opened=False)

    def sample(history: Sequence[int], drawn: int, vocab: int) -> int:
        match history[-1]:
            case 5:
                return channel
            case _ if history[-1] == START:
                return channel
            case _ if history[-1] == channel:
                return analysis  # it would go on thinking for ever
            case _ if history[-1] in (analysis, final):
                return message
        return 9

    tokens = engine_of(sample=sample).run([thinking(add(1, [5], 30), budget)]).tokens[1]
    assert tokens[:9] == [channel, analysis, message, 9, 9, 9, 9, END, START]
    assert tokens[9] == channel
    assert tokens[10] != analysis
    assert tokens.count(analysis) == 1


def test_nothing_is_left_of_requests_that_are_over() -> None:
    engine = engine_of()
    source: Any = engine.client._core._masks._masker  # type: ignore[union-attr]
    engine.client.send(thinking(add(1, [5], 30)))
    for _ in range(4):
        engine.step()
    assert source._thinking
    engine.client.send(Abort([1]))
    engine.run([add(2, [6], 5)])
    assert not source._thinking


def test_a_state_reads_tokens_in_any_pieces() -> None:
    says = [5, 6, START, 1, 2, END, 7]
    for cut in range(2, 6):
        state = Thinking(thinking(add(1, [5, 6], 20), ThinkingBudget(2, [START], [[END]], opened=False)))
        state.read(says[:cut])
        state.read(says[:5])
        assert state.forced == END
        state.read(says)
        assert state.forced is None


@pytest.mark.parametrize(
    "budget",
    [
        ThinkingBudget(1, [START], [[VOCAB]]),
        ThinkingBudget(1, [-1], [[END]]),
        ThinkingBudget(1, [], [[END]]),
        ThinkingBudget(1, [START], []),
        ThinkingBudget(1, [START], [[]]),
    ],
)
def test_a_budget_that_would_break_the_engine_fails_alone(budget: ThinkingBudget) -> None:
    engine = engine_of()
    outcome = engine.run([thinking(add(1, [5], 10), budget), add(2, [6], 10)])
    assert outcome.ends[1].reason == "error"
    assert outcome.tokens[2] == alone([6], 10, sample=unmarked)


def test_an_engine_without_bitmasks_refuses_budgets() -> None:
    outcome = Engine().run([thinking(add(1, [5], 10))])
    assert "limits no reasoning" in outcome.ends[1].message


@pytest.mark.parametrize("masked", [False, True])
def test_masks_behind_drafts_are_those_behind_tokens(masked: bool) -> None:
    """Also of a sequence that is then asked about again: drafts are not tokens yet."""
    rng, bits = random.Random(2), list[bytes]()
    budget = ThinkingBudget(5, [START], [[END, 7], [OTHER_END]], again=True, opened=True)
    message = thinking(add(1, [5, 6], 60, extra_args={"masked": masked}), budget)
    request: Any = types.SimpleNamespace(id=1, tokens=list(message.tokens), add=message)

    def asked(source: ThinkingBudgets, drafts: list[int]) -> list[bytes]:
        source.ask([request], {1: drafts})
        (masks,) = source.bits()
        assert masks is not None
        assert not isinstance(masks, GenerationError)
        return [bytes(each) for each in masks]

    drafting: Any = ThinkingBudgets(HashMasker(), VOCAB)
    drafting.prepare(message)
    while len(request.tokens) < 60:
        drafts = [rng.choice([END, 7, START, OTHER_END, 9, 10]) for _ in range(4)]
        found = asked(drafting, drafts)
        bits += found
        for number in range(5):
            alone: Any = ThinkingBudgets(HashMasker(), VOCAB)
            alone.prepare(message)
            before, request.tokens = request.tokens, request.tokens + drafts[:number]
            assert asked(alone, [])[0] == found[number]
            request.tokens = before
        request.tokens = request.tokens + drafts[: rng.randint(1, 4)]
    assert len(set(bits)) > 2
