"""However tokens are grouped, the text is the same, and ends at the stop string."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.text.text_stream import IncrementalDetokenizer, StopStrings, TextStream
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import IM_END_ID, write_tokenizer
from tests.text.test_tokenizer import LLAMA_2, train_spm

TEXTS = ["naïve café 你好 世界 🙂👩‍👩‍👧", "the quick brown fox", "one\n\ntwo  three", "a�b", "é"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("sentencepiece")
    train_spm(directory, "bpe", **LLAMA_2)
    return load_tokenizer(directory)


def whole(tokenizer: Tokenizer, tokens: list[int], params: SamplingParams) -> str:
    """The definition: decode everything, cut at the stop string that is complete first."""
    text = tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
    ends = [(text.index(s) + len(s), -len(s), s) for s in params.stop_strings if s in text]
    if not ends:
        return text
    end, _, stop = min(ends)
    return text[:end] if params.include_stop_str_in_output else text[: end - len(stop)]


def streamed(tokenizer: Tokenizer, tokens: list[int], params: SamplingParams, cuts: list[int]) -> tuple[str, int]:
    stream = TextStream(tokenizer, params)
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    text, used = "", 0
    for begin, end in itertools.pairwise(edges):
        delta = stream.push(tokens[begin:end], final=end == len(tokens))
        text, used = text + delta.text, used + delta.tokens_used
        if delta.stop:
            break
    return text, used


@settings(max_examples=150)
@given(data=st.data())
def test_every_split_gives_the_whole_text_cut_at_the_stop_string(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(
        st.one_of(
            st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30),
            st.sampled_from([tokenizer.encode(text) for text in TEXTS]),
        )
    )
    skip = data.draw(st.booleans())
    text = tokenizer.decode(tokens, skip_special_tokens=skip)
    pieces = st.sampled_from([text[i : i + n] for i in range(len(text)) for n in (1, 2, 5)] or ["x"])
    stops = data.draw(st.lists(pieces, max_size=3))
    include = data.draw(st.booleans())
    params = SamplingParams(stop=stops or None, include_stop_str_in_output=include, skip_special_tokens=skip)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=8))
    assert streamed(tokenizer, tokens, params, cuts)[0] == whole(tokenizer, tokens, params)
    one_by_one = streamed(tokenizer, tokens, params, list(range(len(tokens))))
    assert one_by_one == streamed(tokenizer, tokens, params, cuts)


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["aab"], "aaab", "a"),
        (["abab!"], "ababab!", "ab"),
        (["abcabd"], "abcabcabd", "abc"),
        (["bc", "abcd"], "abcd", "a"),
        (["bcd", "abcd"], "abcd", ""),
    ],
)
def test_the_stop_string_that_is_complete_first_wins(stops: list[str], text: str, kept: str) -> None:
    for size in (1, 2, 3, len(text)):
        watch = StopStrings(stops)
        seen = ""
        for at in range(0, len(text), size):
            wanted, stop = watch.push(text[at : at + size])
            seen += wanted
            if stop:
                break
        assert (seen, stop in stops) == (kept, True)


@settings(max_examples=60)
@given(data=st.data())
def test_a_sentencepiece_stream_is_what_follows_the_prompt(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="abc é你🙂 ", min_size=1, max_size=30))
    tokens = sentencepiece.encode(text)
    cut = data.draw(st.integers(0, len(tokens)))
    detokenizer = IncrementalDetokenizer(sentencepiece, before=tokens[:cut])
    shown = "".join(map(detokenizer.push, tokens[cut:])) + detokenizer.finish()
    if "�" not in shown:  # a prompt that ends within a character leaves the rest of it without a meaning
        assert shown == sentencepiece.decode(tokens).removeprefix(sentencepiece.decode(tokens[:cut]))
    if cut == 0:
        assert shown == text == sentencepiece.decode(tokens)


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("你🙂")
    assert len(tokens) > 2
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = [detokenizer.push(token) for token in tokens]
    assert "�" not in "".join(shown)
    assert "".join(shown) == "你🙂"
    cut = IncrementalDetokenizer(tokenizer)
    assert [cut.push(token) for token in tokens[:1]] == [""]
    assert cut.finish() == "�"


def test_a_stop_token_shows_no_text_unless_it_is_asked_for(tokenizer: Tokenizer) -> None:
    letter = tokenizer.encode("z")[0]
    tokens = [*tokenizer.encode("fox"), letter]
    hidden = TextStream(tokenizer, SamplingParams(stop_token_ids=[letter]), stop_ids=[letter, IM_END_ID])
    assert hidden.push(tokens, final=True).text == "fox"
    params = SamplingParams(stop_token_ids=[letter], include_stop_str_in_output=True)
    assert TextStream(tokenizer, params, stop_ids=[letter]).push(tokens, final=True).text == "foxz"


def test_text_that_may_begin_a_stop_string_is_held_back_and_no_other(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop="fox trot"))
    assert stream.push(tokenizer.encode("a fox t"), final=False).text == "a "
    assert stream.push(tokenizer.encode("ree"), final=False).text == "fox tree"
    assert stream.push(tokenizer.encode(" fo"), final=True).text == " fo"


def test_nothing_stops_within_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("zzzz")
    stream = TextStream(tokenizer, SamplingParams(stop="z", min_tokens=len(tokens) - 1))
    delta = stream.push(tokens, final=False)
    assert (delta.text, delta.stop) == ("zzz", "z")


def test_without_text_every_token_counts() -> None:
    assert TextStream(None, SamplingParams()).push([1, 2, 3], final=True).tokens_used == 3


def test_work_is_linear_in_the_length_of_the_stop_string(tokenizer: Tokenizer) -> None:
    stop = "z" * 4_000 + "y"
    stream = TextStream(tokenizer, SamplingParams(stop=stop))
    token = tokenizer.encode("z")[0]
    assert stream.push([token] * 60_000, final=True).text == "z" * 60_000


def test_a_word_level_tokenizer_without_a_decoder_streams_too(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Core
    from tokenizers import models, pre_tokenizers

    core = Core(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    words = load_tokenizer(tmp_path)
    assert streamed(words, [0, 1, 0], SamplingParams(), [1, 2])[0] == words.decode([0, 1, 0]) == "a b a"
