"""An engine that pools by a rule: what it makes of a text depends on all that it was sent about it, and nothing else.

Its vectors are those of the fake executor. So a wrong token, type or option makes another vector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from quire.foundation.messages.from_engine import Deltas, End, EndReason, PoolingInfo
from quire.foundation.messages.to_engine import Add, ToEngine
from quire.pooling_params import PoolingParams
from tests.api.scripted import ScriptedClient, ready_to_pool
from tests.api.server import Server, resolved
from tests.executor.fake_pooling import EMBEDS, fake_vector

EMBEDDER = msgspec.structs.replace(EMBEDS, prompts={"query": "query: ", "passage": "passage: "})
_WORDS = ("what", "is", "the", "capital", "of", "france", "paris", "berlin", "a", "big", "town", "it", "rains")

Floats = NDArray[np.float32]


def pooled(
    tokens: Sequence[int], params: PoolingParams, info: PoolingInfo, types: bytes = b"", skip: int = 0
) -> Floats:
    """What the engine makes of a text: float32 of [dim], or of [tokens, dim]."""
    if not params.per_token:
        return fake_vector(tokens, params, info, skip, types)
    return np.stack([fake_vector(tokens[:end], params, info, skip, types[:end]) for end in range(1, len(tokens) + 1)])


class Pooler(ScriptedClient):
    """Pools each text at once, or when the test says so, while it is `held`."""

    def __init__(self, info: PoolingInfo) -> None:
        super().__init__()
        self.info = info
        self.held = False

    def send(self, message: ToEngine) -> None:
        super().send(message)
        if isinstance(message, Add) and not self.held:
            self.finish(message)

    def finish(self, add: Add) -> None:
        """Send the vector of a text."""
        assert add.pooling is not None
        self.vector(add, pooled(add.tokens, add.pooling, self.info, add.token_types, add.prompt_skip))

    def say_end(self, add: Add, reason: EndReason) -> None:
        """End a text without a vector."""
        self.say(Deltas([], [], [], ends=[End(add.id, reason)]))


@contextlib.contextmanager
def pooling(directory: Path, info: PoolingInfo, **settings: Any) -> Iterator[tuple[Server, Pooler]]:
    """A ready server whose engine pools by the rule."""
    engine = Pooler(info)
    with Server(resolved(directory, **settings), lambda: engine) as server:
        engine.say(ready_to_pool(info))
        yield server.wait_ready(), engine


def write_bert_tokenizer(directory: Path) -> None:
    """A WordPiece tokenizer of a few words, which puts [CLS] and [SEP] around texts and pairs."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: place for place, word in enumerate(dict.fromkeys([*special, *_WORDS]))}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **names, mask_token="[MASK]").save_pretrained(directory)
