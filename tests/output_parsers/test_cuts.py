"""Each transcript says what it says however it is cut.

A test that tries every cut in two places takes its time: one transcript of 150 characters has 11,000 of them.
"""

from __future__ import annotations

import pytest

from tests.output_parsers.transcripts import (
    gemma,
    glm,
    harmony,
    hermes,
    json_lists,
    kimi_deepseek,
    llama_json,
    mistral,
    pythonic,
    qwen_coder,
    thinking,
)
from tests.output_parsers.transcripts.transcript import Transcript, check_cuts, check_whole, every_cut, random_cuts

SOURCES = (
    gemma,
    glm,
    harmony,
    hermes,
    json_lists,
    kimi_deepseek,
    llama_json,
    mistral,
    pythonic,
    qwen_coder,
    thinking,
)
TRANSCRIPTS = [transcript for source in SOURCES for transcript in source.TRANSCRIPTS]

each_transcript = pytest.mark.parametrize(
    "transcript", TRANSCRIPTS, ids=lambda found: f"{found.tool}-{found.reasoning_parser}-{found.name}"
)


@each_transcript
def test_the_whole_text_says_what_its_format_means(transcript: Transcript) -> None:
    check_whole(transcript)


@each_transcript
def test_cut_once_or_into_characters_it_says_the_same(transcript: Transcript) -> None:
    check_cuts(transcript, [list(transcript.text), *every_cut(transcript.text, 1)])


@pytest.mark.long("api")
@each_transcript
def test_cut_twice_or_a_thousand_times_at_random_it_says_the_same(transcript: Transcript) -> None:
    check_cuts(transcript, every_cut(transcript.text, 2))
    check_cuts(transcript, random_cuts(transcript.text, 1_000))
