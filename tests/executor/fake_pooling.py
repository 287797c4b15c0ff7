"""What the fake model makes of whole texts: vectors that depend on every token, its type and what is left out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.foundation.messages.from_engine import PoolingInfo
from quire.pooling_params import PoolingParams

EMBEDS = PoolingInfo(["embed", "token_embed"], generates=False, dim=16, matryoshka=True, max_embed_len=0)
"""An embedding model, whose vectors may be shortened."""
CLASSIFIES = PoolingInfo(["classify", "token_classify"], generates=False, labels=["bad", "fair", "good"])
SCORES = PoolingInfo(["score", "classify"], generates=False, labels=["LABEL_0"], reads_pairs=True)
"""A cross-encoder."""


def fake_vector(
    tokens: Sequence[int], params: PoolingParams, info: PoolingInfo, skip: int = 0, types: bytes = b""
) -> npt.NDArray[np.float32]:
    """The fake model's vector [dim] float32 of a text, or of a token behind others, given all tokens up to its own."""
    seed = hashlib.sha256(array("q", [skip, *tokens]).tobytes() + types.rstrip(b"\0")).digest()
    size = 1 if params.task == "score" else info.dim if params.task in ("embed", "token_embed") else len(info.labels)
    values = np.random.default_rng(np.frombuffer(seed, dtype=np.uint32)).standard_normal(size)
    if params.task in ("embed", "token_embed"):
        values = values[: params.dimensions]
        if params.use_activation is not False:
            values = values / np.linalg.norm(values)
    elif params.use_activation is not False:
        values = 1 / (1 + np.exp(-values)) if size == 1 else np.exp(values) / np.exp(values).sum()
    return values.astype("<f4")
