"""Sequences that are never completed: against the plain definition, for all kinds of histories and slots."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.runtime.worker.sampling.token_rules import BadWords
from tests.worker.driver import admitted

VOCAB = 3
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
WORDS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=4)


def forbidden(output: list[int], words: list[list[int]]) -> set[int]:
    """The definition."""
    padded = [*[-1] * 9, *output]
    return {word[-1] for word in words if padded[len(padded) - len(word) + 1 :] == word[:-1]}


@settings(max_examples=200)
@given(owners=st.lists(st.tuples(TOKENS, TOKENS, WORDS), min_size=1, max_size=3), steps=st.lists(TOKENS, max_size=4))
def test_the_last_token_is_not_sampled_after_all_others(
    owners: list[tuple[list[int], list[int], list[list[int]]]], steps: list[list[int]]
) -> None:
    forbidding, outputs = BadWords(torch.device("cpu")), []
    for slot, (prompt, output, words) in enumerate(owners):
        history = {"history": prompt + output, "prompt_len": len(prompt)}
        assert forbidding.admit(admitted(slot, seed=0, num_sampled=len(output), bad_words=words, **history))
        outputs.append(list(output))
    active = [(slot, slot) for slot in range(len(owners))]
    for row in [*steps, []]:
        logits = torch.zeros(len(owners), VOCAB)
        forbidding.apply(logits, active)
        for slot, (_, _, words) in enumerate(owners):
            found = set((logits[slot] == -float("inf")).nonzero().flatten().tolist())
            assert found == forbidden(outputs[slot], words), (outputs[slot], words)
        tokens = torch.tensor([(row * len(owners) + [0] * len(owners))[slot] for slot in range(len(owners))])
        forbidding.record_tokens(tokens, active)
        for slot, token in enumerate(tokens.tolist()):
            outputs[slot].append(token)
