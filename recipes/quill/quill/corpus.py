"""What is trained on: conversations put together from samples, as packed rows of tokens.

Conversations are made while the model trains, in worker processes, and never stored. A row holds whole conversations
only; ``documents`` tells them apart so that attention stays within each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from quill.chat import BEGIN, END, END_OF_TEXT, Message, Sample
from quill.phrasing import expand
from quill.tasks import TASKS, draw, smalltalk
from quill.tokenizer import CONTEXT, special_id

IGNORED = -100
_POOL = 96  # conversations looked through for one that fills a row

_SYSTEM_PROMPTS = (
    "You are [a helpful|a friendly|a kind|a useful|an honest] [assistant|chatbot|model].",
    "You are Quill[.|, the built-in model of Quire.|, a helpful assistant.]",
    "You are a helpful assistant. [Be brief.|Be concise.|Answer briefly.|Be friendly.|Answer in English.]",
    "[Be brief|Be helpful|Answer briefly|Answer the question|Be concise].",
    "You are [a helpful AI assistant|an AI assistant|an expert|a teacher|a tutor].",
    "[Help the user.|Answer the user's questions.|You answer questions.]",
)


def conversation(rng: Random) -> tuple[Message, ...]:
    """One training conversation, all of it from the training side of the held-out line."""
    names = list(TASKS)
    name = rng.choices(names, [task.share for task in TASKS.values()])[0]
    samples = [draw(TASKS[name].make, rng, "train")]
    if TASKS[name].chains and rng.random() < 0.5:
        samples += _continuation(rng, name)
    elif name == "tools" and rng.random() < 0.25:
        samples.insert(rng.randint(0, 1), draw(smalltalk.make_greeting, rng, "train"))
    system = [m for sample in samples for m in sample.messages if m.role == "system"]
    if not system and rng.random() < 0.25:
        system = [Message("system", expand(rng, rng.choice(_SYSTEM_PROMPTS)))]
    return (*system[:1], *(m for sample in samples for m in sample.messages if m.role != "system"))


def _continuation(rng: Random, first: str) -> list[Sample]:
    """Up to five more samples of tasks that chain. Memory stands in a conversation once, as its newest fact counts."""
    chained = {name: task for name, task in TASKS.items() if task.chains and not (name == "memory" == first)}
    samples: list[Sample] = []
    for name in rng.choices(list(chained), [task.share for task in chained.values()], k=rng.randint(1, 5)):
        sample = draw(chained[name].make, rng, "train")
        if sample.messages[0].role != "system" and not (name == "memory" and any(s.task == "memory" for s in samples)):
            samples.append(sample)
    return samples


@dataclass(frozen=True)
class Document:
    """A conversation's tokens; ``targets[i]`` is the token to predict after ``tokens[i]``, or IGNORED."""

    tokens: list[int]
    targets: list[int]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.targets)


class Encoder:
    """Turns conversations into documents; only what the assistant says, with its closing token, is a target."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin, self._end = special_id(tokenizer, BEGIN), special_id(tokenizer, END)
        self._newline = tokenizer.encode("\n").ids
        self._assistant = tokenizer.encode("assistant\n").ids

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[Document]:
        texts = [m.content if m.role == "assistant" else f"{m.role}\n{m.content}" for c in conversations for m in c]
        encoded = iter(self._tokenizer.encode_batch_fast(texts))
        return [self._document([(m.role == "assistant", next(encoded).ids) for m in c]) for c in conversations]

    def _document(self, turns: list[tuple[bool, list[int]]]) -> Document:
        tokens: list[int] = []
        trained: list[bool] = []
        for is_answer, ids in turns:
            opening = [self._begin, *(self._assistant if is_answer else [])]
            tokens += [*opening, *ids, self._end, *self._newline]
            trained += [False] * len(opening) + [is_answer] * (len(ids) + 1) + [False] * len(self._newline)
        targets = [t if on else IGNORED for t, on in zip(tokens[1:], trained[1:], strict=True)]
        return Document(tokens[:-1], targets)


@dataclass(frozen=True)
class Batch:
    """int64 tensors, each [rows, CONTEXT]; padding is a document of its own."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor


class PackedRows(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """An endless stream of batches (tokens, targets, documents) as int16 [rows, CONTEXT], other ones in each worker."""

    def __init__(self, tokenizer_json: str, rows: int, seed: int) -> None:
        self._tokenizer_json, self._rows, self._seed = tokenizer_json, rows, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        worker = get_worker_info()
        rng = Random(f"{self._seed} {worker.id if worker else 0}")
        tokenizer = Tokenizer.from_str(self._tokenizer_json)
        padding = special_id(tokenizer, END_OF_TEXT)
        rows = pack(documents(rng, Encoder(tokenizer)), padding)
        while True:
            batch = np.stack([next(rows) for _ in range(self._rows)], axis=1)  # [3, rows, CONTEXT]
            tokens, targets, ids = torch.from_numpy(batch)
            yield tokens, targets, ids


def documents(rng: Random, encoder: Encoder) -> Iterator[Document]:
    while True:
        encoded = encoder.encode([conversation(rng) for _ in range(64)])
        yield from (document for document in encoded if len(document.tokens) <= CONTEXT)


def pack(stream: Iterator[Document], padding: int) -> Iterator[np.ndarray[tuple[int, int], np.dtype[np.int16]]]:
    """Rows [3, CONTEXT] of tokens, targets and document numbers, filled from a pool, the longest that fits first."""
    pool = [next(stream) for _ in range(_POOL)]
    while True:
        row = np.empty((3, CONTEXT), dtype=np.int16)
        row[0], row[1] = padding, IGNORED
        used = count = 0
        while fitting := [i for i, document in enumerate(pool) if used + len(document.tokens) <= CONTEXT]:
            # The oldest document opens the row, so that none waits forever.
            chosen = fitting[0] if not count else max(fitting, key=lambda i: len(pool[i].tokens))
            document = pool.pop(chosen)
            end = used + len(document.tokens)
            row[0, used:end], row[1, used:end], row[2, used:end] = document.tokens, document.targets, count
            used, count = end, count + 1
            pool.append(next(stream))
        row[2, used:] = count
        yield row


def batches(tokenizer: Tokenizer, rows: int, seed: int, workers: int, device: torch.device) -> Iterator[Batch]:
    loader = DataLoader(
        PackedRows(tokenizer.to_str(), rows, seed),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=device.type == "cuda",
    )
    for tensors in loader:
        tokens, targets, ids = (tensor.to(device, non_blocking=True).long() for tensor in tensors)
        yield Batch(tokens, targets, ids)
