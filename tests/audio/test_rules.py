"""The rules of transcripts' tokens, compared with transformers' logits processors, and what is made of tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from quire.foundation.messages.to_engine import Add, TimestampRules, TranscriptRules
from quire.runtime.worker.sampling.transcript_tokens import TranscriptTokens
from quire.sampling_params import SamplingParams
from quire.serving.api.audio.segments import compression_ratio, cut
from quire.text.speech_tokens import SpeechTokens, load_speech_tokens
from tests.audio.checkpoints import IDS, START, make_whisper
from tests.worker.driver import admitted

VOCAB, END, BARRED = 60, 30, 38
BEGIN, LATEST = BARRED + 1, BARRED + 1 + 8
NEVER, NOT_FIRST, PROMPT = [3, 4], [5, END], [31, 32, 33]
RULES = TranscriptRules(NEVER, NOT_FIRST, TimestampRules(BEGIN, END, BARRED, LATEST))


def restricted(output: Sequence[int], scores: torch.Tensor, recorded: int) -> torch.Tensor:
    """What our rules leave of the scores behind an output, the last `recorded` tokens of which were sampled here."""
    known = output[: len(output) - recorded]
    owner = admitted(2, seed=0, num_sampled=len(known), history=[*PROMPT, *known], prompt_len=len(PROMPT))
    rules, made = TranscriptTokens(torch.device("cpu")), scores.clone()
    assert rules.admit(msgspec.structs.replace(owner, transcript=RULES))
    for token in output[len(known) :]:
        rules.record_tokens(torch.tensor([7, token]), [(1, 2)])
    rules.apply(made[None], [(0, 2)])
    return made


def expected(output: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = SimpleNamespace(
        no_timestamps_token_id=BARRED, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=LATEST - BEGIN
    )
    begin = len(PROMPT)
    ids, made = torch.tensor([[*PROMPT, *output]]), scores[None].clone()
    for processor in (
        SuppressTokensAtBeginLogitsProcessor(NOT_FIRST, begin),
        SuppressTokensLogitsProcessor(NEVER),
        WhisperTimeStampLogitsProcessor(config, begin),
    ):
        made = processor(ids, made)
    return made[0]


@pytest.mark.parametrize("seed", range(40))
def test_scores_are_those_of_transformers(seed: int) -> None:
    """Outputs are drawn as the rules allow them, however much of one was sampled before a preemption."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    output = list[int]()
    for _ in range(12):
        scores = torch.randn(VOCAB, generator=generator) * 3
        theirs = expected(output, scores)
        assert torch.equal(restricted(output, scores, drawn.randint(0, len(output))), theirs)
        allowed = [token for token in theirs.isfinite().nonzero()[:, 0].tolist() if token != END]
        if not allowed:
            break
        output.append(drawn.choice(allowed))


def test_a_preempted_transcript_comes_back_with_its_history() -> None:
    from quire.scheduling.kvcache.block_hashes import BlockHashes
    from quire.scheduling.kvcache.block_pool import BlockPool
    from quire.scheduling.kvcache.block_table import BlockTable
    from quire.scheduling.kvcache.cache_groups import FULL_ATTENTION
    from quire.scheduling.scheduler.lengths import Lengths
    from quire.scheduling.scheduler.request import Request

    def needs(transcript: TranscriptRules | None) -> bool:
        add = Add(1, [1, 2], 2, SamplingParams(max_tokens=4), [], 0, 0.0, transcript=transcript)
        table = BlockTable(BlockPool(4, 16), FULL_ATTENTION)
        return Request(add, table, BlockHashes(16), (0.0, 1), Lengths()).needs_history

    assert needs(RULES)
    assert not needs(None)


MARKS = SpeechTokens(31, END, {}, {}, BARRED, BEGIN, None, BARRED - 1, RULES)


@pytest.mark.parametrize(
    ("tokens", "spans", "behind"),
    [
        ([BEGIN, 1, 2, BEGIN + 5, BEGIN + 5, 3, BEGIN + 9, BEGIN + 9, 4], [(0, 5), (5, 9)], 18),
        ([BEGIN, 1, 2, BEGIN + 5, BEGIN + 5, 3, BEGIN + 9], [(0, 5), (5, 9)], 40),
        ([BEGIN + 1, 1, 2, BEGIN + 7], [(0, 7)], 40),
        ([BEGIN, 1, 2], [(0, 20)], 40),
        ([1, 2], [(0, 20)], 40),
        ([], [(0, 20)], 40),
        ([BEGIN, BEGIN], [(0, 0)], 40),
    ],
)
def test_pieces_are_cut_at_pairs_of_timestamps(tokens: list[int], spans: list[tuple[int, int]], behind: int) -> None:
    made, next_piece = cut(tokens, 40, MARKS)
    assert ([(span.start, span.end) for span in made], next_piece) == (spans, behind)


def test_a_text_that_repeats_itself_is_compressed_more() -> None:
    assert compression_ratio("no " * 100) > 5 > compression_ratio("a sentence that says something") > 0.5
    assert compression_ratio("") == 0


@pytest.mark.parametrize(("size", "is_multilingual"), [(51_864, False), (51_865, True)])
def test_old_files_tell_languages_by_the_vocabulary(tmp_path: Path, size: int, is_multilingual: bool) -> None:
    from quire.text.tokenizer import load_tokenizer

    directory = make_whisper(tmp_path)
    for name, keys in (
        ("config.json", ()),
        ("generation_config.json", ("is_multilingual", "lang_to_id", "task_to_id")),
    ):
        values = json.loads((directory / name).read_text())
        kept = {key: value for key, value in values.items() if key not in keys} | {"vocab_size": size}
        (directory / name).write_text(json.dumps(kept))
    marks = load_speech_tokens(directory, load_tokenizer(directory))
    assert sorted(marks.languages) == (["de", "en", "fr"] if is_multilingual else [])
    assert bool(marks.tasks) == is_multilingual
    prompt = marks.prompt("de" if is_multilingual else None, "translate", [5], timestamps=True)
    named = [IDS["<|de|>"], IDS["<|translate|>"]] if is_multilingual else []
    assert prompt == [IDS["<|startofprev|>"], 5, START, *named]
