"""Finds out how a checkpoint's sounds become tokens, and how large its tower for them is, without weights.

Run as a program by processes that do not import torch: prints a HearingSpec, or an error, as JSON.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.errors import CheckpointError
from quire.models.audio.hearing_spec import HearingSpec
from quire.models.fallback.audio_processor import CheckpointAudioProcessor
from quire.models.fallback.classes import read_config, text_config_of
from quire.models.fallback.inspection import answer
from quire.models.fallback.tower import build_tower_model

_TOKENS = ("audio_token_id", "audio_token_index")
_SHORTEST_S = 0.1
_PIECE_S = 30.0
"""What many towers read at once, in seconds; some processors cut what is longer."""
_LONGEST_S = 1_200.0
_STATES = 24
"""Elements that a tower computes at once for each element that it is given."""


def describe(directory: Path) -> HearingSpec:
    """Describe the tower for sounds of a checkpoint.

    Raises:
        CheckpointError: transformers cannot compute it, or has no processor for it.
    """
    config = read_config(directory)
    architecture = str((config.architectures or [""])[0])
    model = build_tower_model(directory, architecture, torch.float32, images=False)
    token = audio_token_of(config)
    processor = CheckpointAudioProcessor(directory, token)
    counts, elements = [], 0
    for seconds in (_SHORTEST_S, _PIECE_S, 2 * _PIECE_S):
        found = processor.inputs(np.zeros(int(seconds * processor.rate), np.float32))
        counts.append(found.tokens.count(token))
        elements = sum(each.size for each in found.tensors.values())
    least, piece, twice = counts
    longest = _PIECE_S if twice == piece else min(_LONGEST_S, _longest_of(config, piece))
    share = longest / (_PIECE_S if twice == piece else 2 * _PIECE_S)
    return HearingSpec(
        directory=str(directory),
        architecture=architecture,
        audio_token=token,
        placeholder=processor.placeholder,
        outputs=text_config_of(config).hidden_size,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        rate=processor.rate,
        longest_s=longest,
        least_tokens=max(1, least),
        largest_tokens=piece if twice == piece else math.ceil(longest / _PIECE_S) * (twice - piece),
        elements=int(_STATES * elements * share),
    )


def audio_token_of(config: Any) -> int:
    """Return the token that stands for a vector of a sound. Raises CheckpointError if a config names none."""
    for name in _TOKENS:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise CheckpointError("config.json has no audio_token_id, which tells where sounds stand: download it again.")


def _longest_of(config: Any, piece: int) -> float:
    """Return how many seconds, in whole pieces, fit into the context of the text model."""
    context = getattr(text_config_of(config), "max_position_embeddings", None)
    if not isinstance(context, int):
        return _LONGEST_S
    return max(1, context // max(1, piece)) * _PIECE_S


if __name__ == "__main__":
    answer(describe)
