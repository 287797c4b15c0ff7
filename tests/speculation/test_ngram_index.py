"""Prompt lookup: what is proposed, and that long texts are read in parts."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from quire.scheduling.speculation.ngram_index import NgramIndex

ALL = 2**30


def proposed(tokens: list[int], most: int = 4, longest: int = 3, shortest: int = 2) -> list[int]:
    index = NgramIndex(tokens, longest, shortest)
    index.catch_up(ALL)
    return index.propose(most)


def slowly(tokens: list[int], most: int, longest: int, shortest: int) -> list[int]:
    """The same by looking at every place of the text."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for place in range(end, end + most):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


def test_what_followed_the_last_tokens_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 9, 1, 2, 3]) == [4, 9, 1, 2]
    assert proposed([1, 2, 3, 4, 9, 1, 2, 3], most=1) == [4]


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    assert proposed([]) == proposed([1]) == proposed([1, 2, 3, 4]) == proposed([1, 5, 2, 5]) == []


def test_longer_runs_go_first_and_then_later_places() -> None:
    assert proposed([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], most=1) == [7]
    assert proposed([9, 2, 3, 7, 8, 2, 3, 6, 0, 2, 3], most=1) == [6]


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert proposed([7, 7, 7]) == [7, 7, 7, 7]
    assert proposed([7, 8, 7, 8, 7], most=5) == [8, 7, 8, 7, 8]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
def test_it_finds_what_a_search_of_the_whole_text_finds(tokens: list[int], most: int, shortest: int, more: int) -> None:
    assert proposed(tokens, most, shortest + more, shortest) == slowly(tokens, most, shortest + more, shortest)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 59))
def test_appended_tokens_are_found_like_those_at_the_beginning(tokens: list[int], at: int) -> None:
    index = NgramIndex(tokens[:at], 3, 2)
    index.catch_up(ALL)
    for token in tokens[at:]:
        index.append([token])
        index.catch_up(ALL)
    assert index.propose(5) == proposed(tokens, 5)


def test_a_long_prompt_is_read_in_parts_and_serves_meanwhile() -> None:
    rng = random.Random(0)
    tokens = [1, 2, 3, 4, *(rng.randrange(10, 10_000) for _ in range(5_000)), 1, 2, 3]
    index = NgramIndex(tokens, 3, 2)
    assert index.catch_up(1_000) == 1_000
    assert index.propose(1) == [4]
    assert [index.catch_up(2_000) for _ in range(4)] == [2_000, 2_000, 6, 0]
