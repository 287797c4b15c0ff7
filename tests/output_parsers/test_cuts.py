"""Each transcript says what it says however it is cut.

Two cuts that are far apart are as good as one and another one, so only those near each other are all tried: a
transcript of 150 characters has 11,000 pairs.
"""

from __future__ import annotations

import pytest

from quire.text.output_parsers.registry import REASONING_PARSERS, TOOL_PARSERS
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
    same_format,
    thinking,
)
from tests.output_parsers.transcripts.transcript import (
    Transcript,
    check_cuts,
    check_whole,
    every_cut,
    every_pair_of_cuts,
    random_cuts,
)

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
    same_format,
    thinking,
)
TRANSCRIPTS = [transcript for source in SOURCES for transcript in source.TRANSCRIPTS]

each_transcript = pytest.mark.parametrize(
    "transcript", TRANSCRIPTS, ids=lambda found: f"{found.tool}-{found.reasoning_parser}-{found.name}"
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("tool", name) for name in TOOL_PARSERS), *(("reasoning_parser", name) for name in REASONING_PARSERS)],
)
def test_every_parser_reads_what_is_whole_cut_off_and_malformed(kind: str, name: str) -> None:
    own = [transcript for transcript in TRANSCRIPTS if getattr(transcript, kind) == name]
    said = [transcript.calls if kind == "tool" else transcript.reasoning for transcript in own]
    assert any(said)
    assert any(transcript.name.startswith("cut off") for transcript in own)
    assert any(transcript.name.startswith("malformed") for transcript in own)


@each_transcript
def test_the_whole_text_says_what_its_format_means(transcript: Transcript) -> None:
    check_whole(transcript)


@each_transcript
def test_cut_once_or_into_characters_it_says_the_same(transcript: Transcript) -> None:
    check_cuts(transcript, [list(transcript.text), *every_cut(transcript.text)])


@pytest.mark.long("api")
@each_transcript
def test_cut_twice_or_at_random_it_says_the_same(transcript: Transcript) -> None:
    check_cuts(transcript, every_pair_of_cuts(transcript.text, 12))
    check_cuts(transcript, random_cuts(transcript.text, 200))
