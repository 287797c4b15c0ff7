"""Suffix decoding: what is proposed, beside a search of all occurrences, and what of other outputs is seen by whom."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.foundation.config.speculation import SuffixOptions
from quire.scheduling.speculation.suffix_index import END, MAX_OCCURRENCES, PastOutputs, SuffixIndex

ALL = 2**30
ALONE = SuffixOptions(depth=12, cached_requests=0, factor=1.0, least_probability=0.1)


def index_of(
    tokens: list[int], options: SuffixOptions = ALONE, past: PastOutputs | None = None, audience: str = ""
) -> SuffixIndex:
    index = SuffixIndex(tokens, options, past or PastOutputs(options.cached_requests), audience)
    index.catch_up(ALL)
    return index


def proposed(tokens: list[int], most: int = 4, options: SuffixOptions = ALONE) -> list[int]:
    return index_of(tokens, options).propose(most)


def slowly(tokens: list[int], most: int, options: SuffixOptions) -> list[int]:
    """What is to be proposed, by looking at every place for every length of a match, the longest and the last first."""
    best, best_score = list[int](), 0.0
    for size in range(min(max(2, options.depth - most), len(tokens)), 1, -1):
        suffix = tokens[-size:]
        places = [end for end in range(len(tokens) - 2, size - 2, -1) if tokens[end - size + 1 : end + 1] == suffix]
        said, score = walk(tokens, places, min(most, int(size * options.factor)), options.least_probability)
        if score > best_score:
            best, best_score = said, score
    return best


def walk(tokens: list[int], places: list[int], limit: int, least: float) -> tuple[list[int], float]:
    """Follow the most frequent token, of several the one that was said last: the tokens, and the sum of their
    probabilities."""
    said: list[int] = []
    probability, score = 1.0, 0.0
    while places and len(said) < limit:
        text = tokens + said
        following = Counter(text[place + 1 + len(said)] for place in places)
        token, count = following.most_common(1)[0]
        probability *= count / len(places)
        if probability < least:
            break
        places = [place for place in places if text[place + 1 + len(said)] == token]
        said.append(token)
        score += probability
    return said, score


def test_what_followed_the_longest_match_is_proposed_as_far_as_the_match_is_long() -> None:
    assert proposed([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9]
    assert proposed([1, 2, 3, 4, 5, 9, 1, 2, 3], most=1) == [4]
    twice = SuffixOptions(depth=12, cached_requests=0, factor=2.0, least_probability=0.1)
    assert proposed([1, 2, 3, 4, 5, 9, 8, 7, 1, 2, 3], most=6, options=twice) == [4, 5, 9, 8, 7, 1]


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    assert proposed([]) == proposed([1]) == proposed([1, 2, 3, 4]) == proposed([1, 5, 2, 5]) == []


def test_the_most_frequent_continuation_goes_first_and_unlikely_ones_end() -> None:
    text = [1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 7, 5, 1, 2]
    assert proposed(text)[0] == 7
    sure = SuffixOptions(depth=12, cached_requests=0, factor=1.0, least_probability=0.7)
    assert proposed(text, options=sure) == []


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert proposed([7, 8] * 6, most=5) == [7, 8, 7, 8, 7]


@given(st.lists(st.integers(0, 2), max_size=MAX_OCCURRENCES), st.integers(1, 6), st.sampled_from([0.5, 1.0, 3.0]),
       st.sampled_from([0.0, 0.1, 0.6]))  # fmt: skip
def test_it_is_the_best_of_all_places(tokens: list[int], most: int, factor: float, least: float) -> None:
    options = SuffixOptions(10, 0, factor, least)
    assert proposed(tokens, most, options) == slowly(tokens, most, options)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 59))
def test_appended_tokens_are_found_like_those_at_the_beginning(tokens: list[int], at: int) -> None:
    index = index_of(tokens[:at])
    for token in tokens[at:]:
        index.append([token])
        index.catch_up(ALL)
    assert index.propose(5) == proposed(tokens, 5)


def test_a_long_prompt_is_read_in_parts_and_serves_meanwhile() -> None:
    index = SuffixIndex([1, 2, 3, 4, *range(10, 3_000), 1, 2, 3], ALONE, PastOutputs(0), "")
    assert [index.catch_up(2_000), index.propose(1)] == [2_000, [4]]
    assert [index.catch_up(2_000) for _ in range(2)] == [997, 0]


def options(requests: int) -> SuffixOptions:
    return SuffixOptions(depth=24, cached_requests=requests, factor=1.0, least_probability=0.1)


def test_what_others_have_said_is_proposed_to_the_same_audience_alone() -> None:
    past = PastOutputs(100)
    for audience, said in (("a", [5, 6, 7, 8, 9]), ("b", [5, 6, 1, 1, 1])):
        index = index_of([3, 4], options(100), past, audience)
        index.append(said)
        index.close()
    assert index_of([0, 5, 6], options(100), past, "a").propose(4) == [7, 8]
    assert index_of([0, 5, 6], options(100), past, "b").propose(4) == [1, 1]
    assert index_of([0, 5, 6], options(100), past, "c").propose(4) == []
    assert index_of([0, 3, 4], options(100), past, "a").propose(4) == [], "prompts are nobody's to see"


def test_nothing_is_proposed_across_the_end_of_an_output() -> None:
    past = PastOutputs(8)
    for said in ([1, 2, 3], [7, 8, 9]):
        past.add("", said)
    found = index_of([0, 2, 3], options(8), past).propose(4)
    assert found == []
    assert END not in found


@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_only_the_last_outputs_are_remembered(most: int) -> None:
    past, draw = PastOutputs(most), random.Random(0)
    for number in range(1_000):
        past.add(draw.choice("abc"), [number, 5_000 + number, 9_000])
        kept = sum(text.tokens.count(END) for audience in "abc" for text in past.texts(audience))
        assert min(number + 1, most // 2) <= kept <= most
    newest = [index_of([999, 5_999], options(most), past, audience).propose(1) for audience in "abc"]
    assert newest.count([9_000]) == 1


def test_a_long_output_of_others_is_read_in_parts() -> None:
    """It may be remembered in a step that nobody is to wait for."""
    past = PastOutputs(100)
    past.add("", [*range(3_000), 1, 2, 9])
    past.add("", [5_000, 5_001, 5_002])
    index = SuffixIndex([7, 5_000, 5_001], options(100), past, "")
    assert [index.catch_up(2_000), index.propose(2)] == [2_000, []]
    assert [index.catch_up(2_000) for _ in range(2)] == [3 + 3_003 + 1 + 4 - 2_000, 0]
    assert index.propose(1) == [5_002]


def test_outputs_are_forgotten_by_their_tokens_as_well() -> None:
    past = PastOutputs(10_000, tokens=4_000)
    for _ in range(100):
        past.add("", list(range(300)))
        assert sum(len(text.tokens) for text in past.texts("")) <= 4_000 + 4_000 // 300 + 1


@pytest.mark.parametrize("depth", [2, 3, 6, 24])
def test_a_match_and_its_continuation_are_no_longer_than_the_depth(depth: int) -> None:
    bold = SuffixOptions(depth=depth, cached_requests=0, factor=8.0, least_probability=0.0)
    found = proposed([*range(50), *range(20)], most=16, options=bold)
    assert len(found) == min(16, depth - 2)
