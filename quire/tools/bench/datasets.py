"""Prompts and output lengths to measure with: random, shared prefixes, ShareGPT conversations, a file of one's own.

Everything is drawn from the random generator that is given, so one seed makes one dataset. Token ids and texts come
from a tokenizer in this process, or from that of a running server.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from quire.errors import ConfigError, reason
from quire.foundation.http_client.http1 import HttpError
from quire.foundation.http_client.pool import BlockingClient
from quire.text.tokenizer import Tokenizer
from quire.tools.bench.random_images import ImageOptions

_LOWEST_ID = 3
"""Ids below this are special tokens in most vocabularies."""
_SAMPLE = string.printable + " ".join(a + b for a in string.ascii_lowercase for b in string.ascii_lowercase)
DatasetName = Literal["random", "random-mm", "sharegpt", "custom", "prefix_repetition"]
SHAREGPT_LONGEST_PROMPT, SHAREGPT_LONGEST = 1024, 2048
SHAREGPT_SHORTEST = 4
"""Tokens: vLLM keeps conversations within the same limits, so figures can be compared."""


def has_tokenizer(http: BlockingClient, model: str) -> bool:
    """Whether the server takes text. A server that works on token ids only refuses to tokenize with status 400."""
    try:
        status, _ = http.ask("POST", "/tokenize", {"model": model, "prompt": "a"})
    except HttpError:
        return True
    return status != 400


class Tokens(Protocol):
    """A model's tokens."""

    def random_ids(self, count: int, rng: random.Random) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class LocalTokens:
    """Tokens of a tokenizer in this process, or of a vocabulary of this size alone, which has no texts."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None = None) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer

    def random_ids(self, count: int, rng: random.Random) -> list[int]:
        return rng.choices(range(min(_LOWEST_ID, self._vocab_size - 1), self._vocab_size), k=count)

    def encode(self, text: str) -> list[int]:
        return self._known().encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._known().decode(ids)

    def _known(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("This dataset needs a tokenizer: give --tokenizer, or take --dataset-name random.")
        return self._tokenizer


class ServedTokens:
    """Tokens of a server's model, by /tokenize and /detokenize. Random ids are those of a sample text."""

    def __init__(self, http: BlockingClient, model: str) -> None:
        self._http = http
        self._model = model
        self._ids: list[int] = []

    def random_ids(self, count: int, rng: random.Random) -> list[int]:
        if not self._ids:
            self._ids = sorted(set(self.encode(_SAMPLE)))
        return rng.choices(self._ids, k=count)

    def encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._asked("/tokenize", body)["tokens"]
        return tokens

    def decode(self, ids: list[int]) -> str:
        return str(self._asked("/detokenize", {"model": self._model, "tokens": ids})["prompt"])

    def _asked(self, path: str, body: dict[str, object]) -> dict[str, list[int]]:
        try:
            status, content = self._http.ask("POST", path, body)
            if status != 200:
                raise ValueError(f"it answers {status}")
            found: dict[str, list[int]] = msgspec.json.decode(content)
            return found
        except (HttpError, msgspec.DecodeError, ValueError) as error:
            raise ConfigError(
                f"The server does not {path.strip('/')} for this benchmark ({reason(error)}): "
                "give --tokenizer, or --vocab-size for random token ids."
            ) from error


@dataclass(frozen=True)
class DatasetOptions(ImageOptions):
    """Which prompts, and how many."""

    dataset_name: DatasetName | None = None
    """Default: random, or what --dataset-path looks like: .jsonl is custom, .json is sharegpt."""
    dataset_path: str | None = None
    """File of a sharegpt or custom dataset. custom: lines of {"prompt": text}, optionally with "output_tokens"."""
    num_prompts: int = 1000
    """How many prompts."""
    input_len: int | None = None
    """Tokens a prompt, in datasets that make their prompts up."""
    output_len: int | None = None
    """Tokens an output, in any dataset."""
    random_input_len: int = 1024
    """random: tokens a prompt, beside its prefix."""
    random_output_len: int = 128
    """random: tokens an output."""
    random_range_ratio: float = 0.0
    """random: lengths are drawn from length × (1 ± this)."""
    random_prefix_len: int = 0
    """random: tokens that all prompts begin with."""
    random_batch_size: int = 1
    """With backends for embeddings, texts a request; for reranking, documents a query."""
    sharegpt_output_len: int | None = None
    """sharegpt: tokens an output. Default: as long as the recorded answer."""
    custom_output_len: int = 256
    """custom: tokens an output, where the line does not say."""
    prefix_repetition_prefix_len: int = 256
    """prefix_repetition: tokens of a shared prefix."""
    prefix_repetition_suffix_len: int = 256
    """prefix_repetition: tokens after it."""
    prefix_repetition_num_prefixes: int = 10
    """prefix_repetition: how many prefixes there are."""
    prefix_repetition_output_len: int = 128
    """prefix_repetition: tokens an output."""

    @property
    def name(self) -> DatasetName:
        """The dataset's name, also when only a file is given."""
        if self.dataset_name is not None:
            return self.dataset_name
        if self.dataset_path is None:
            return "random"
        return "custom" if self.dataset_path.endswith(".jsonl") else "sharegpt"


@dataclass(frozen=True)
class Sample:
    """One prompt, as text or token ids, and how many tokens to generate for it; `others` are further texts of a request
    that generates none, or the later turns of a conversation, of the model and the user by turns. `images` are data:
    URLs, which a chat's first message has."""

    prompt: str | list[int]
    output_len: int
    others: tuple[str | list[int], ...] = ()
    images: tuple[str, ...] = ()


def make_samples(
    options: DatasetOptions, tokens: Tokens, rng: random.Random, *, takes_images: bool = False
) -> list[Sample]:
    """At most `num_prompts` samples, as far as the file has them; with images only where who sends them `takes_images`.
    Raises ConfigError for wrong options or files."""
    if options.name == "random-mm" and not takes_images:
        raise ConfigError(
            "--dataset-name random-mm has images, which quire bench serve --backend openai-chat sends.",
            param="dataset_name",
        )
    if options.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {options.num_prompts}.", param="num_prompts")
    readers = {
        "random": _random,
        "random-mm": _random_with_images,
        "prefix_repetition": _prefix_repetition,
        "sharegpt": _sharegpt,
        "custom": _custom,
    }
    samples = list(islice(readers[options.name](options, tokens, rng), options.num_prompts))
    if not samples:
        raise ConfigError(f"{options.dataset_path} has no prompt that could be used.", param="dataset_path")
    if min(sample.output_len for sample in samples) < 1:
        raise ConfigError("The output length must be at least 1 token.", param="output_len")
    return samples


def batched(samples: Sequence[Sample], size: int) -> list[Sample]:
    """Each `size` of these samples as one, in order; without those that are left over."""
    starts = range(0, len(samples) - size + 1, size)
    return [replace(samples[at], others=tuple(each.prompt for each in samples[at + 1 : at + size])) for at in starts]


def _random(options: DatasetOptions, tokens: Tokens, rng: random.Random) -> Iterator[Sample]:
    prompt = options.random_input_len if options.input_len is None else options.input_len
    output = options.random_output_len if options.output_len is None else options.output_len
    ratio = options.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {ratio}.", param="random_range_ratio")
    if prompt + options.random_prefix_len < 1:
        raise ConfigError("A prompt must have at least 1 token.", param="input_len")
    prefix = tokens.random_ids(options.random_prefix_len, rng)
    for _ in range(options.num_prompts):
        yield Sample(prefix + tokens.random_ids(_around(prompt, ratio, rng), rng), max(1, _around(output, ratio, rng)))


def _random_with_images(options: DatasetOptions, tokens: Tokens, rng: random.Random) -> Iterator[Sample]:
    for sample, images in zip(_random(options, tokens, rng), options.draw(rng), strict=False):
        yield replace(sample, images=images)


def _around(length: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio)))


def _prefix_repetition(options: DatasetOptions, tokens: Tokens, rng: random.Random) -> Iterator[Sample]:
    count = options.prefix_repetition_num_prefixes
    if count < 1:
        raise ConfigError(
            "--prefix-repetition-num-prefixes must be at least 1.", param="prefix_repetition_num_prefixes"
        )
    output = options.prefix_repetition_output_len if options.output_len is None else options.output_len
    prefixes = [tokens.random_ids(options.prefix_repetition_prefix_len, rng) for _ in range(count)]
    order = [prefixes[number % count] for number in range(options.num_prompts)]
    rng.shuffle(order)
    for prefix in order:
        yield Sample(prefix + tokens.random_ids(options.prefix_repetition_suffix_len, rng), output)


def _sharegpt(options: DatasetOptions, tokens: Tokens, rng: random.Random) -> Iterator[Sample]:
    fixed = options.sharegpt_output_len if options.output_len is None else options.output_len
    turns = [entry.get("conversations", []) for entry in _entries(options) if isinstance(entry, dict)]
    pairs = [(talk[0].get("value"), talk[1].get("value")) for talk in turns if len(talk) >= 2]
    rng.shuffle(pairs)
    for prompt, answer in pairs:
        length = len(tokens.encode(prompt))
        output = len(tokens.encode(answer)) if fixed is None else fixed
        usual = SHAREGPT_SHORTEST <= length <= SHAREGPT_LONGEST_PROMPT and length + output <= SHAREGPT_LONGEST
        if usual and (fixed is not None or output >= SHAREGPT_SHORTEST):
            yield Sample(prompt, output)


def _custom(options: DatasetOptions, tokens: Tokens, rng: random.Random) -> Iterator[Sample]:
    entries = _entries(options)
    rng.shuffle(entries)
    for entry in entries:
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            raise ConfigError(f'{options.dataset_path}: a line has no "prompt".', param="dataset_path")
        own = entry.get("output_tokens")
        usual = options.custom_output_len if own is None else int(own)
        yield Sample(prompt, usual if options.output_len is None else options.output_len)


def _entries(options: DatasetOptions) -> list[Any]:
    """The values in the file: the items of a JSON list, or one JSON value a line."""
    path = options.dataset_path
    if path is None:
        raise ConfigError(f"--dataset-name {options.name} needs --dataset-path.", param="dataset_path")
    try:
        text = Path(path).read_text()
        if path.endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {reason(error)}.", param="dataset_path") from error
    return content if isinstance(content, list) else [content]
