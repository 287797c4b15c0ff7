"""Text to token ids and back: a model's tokenizer and its special tokens. Knows nothing about requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, processors

from quire.errors import CheckpointError, RequestError
from quire.text.text_pairs import WHOLE_PAIRS, PairLimits, encode_pairs
from quire.text.token_bytes import bytes_of_token
from quire.text.tokenizer_files import SENTENCEPIECE, TokenizerSettings, load_core, read_settings

LONG_DECODE = 1_000
"""More tokens than this are decoded while other threads run."""
CUT_MARGIN = 10_000
"""Characters of a text that are encoded beyond what the wanted tokens may take."""
_MAX_UNLISTED = 4096
"""Maximum number of ids that no file lists, before an added token."""
logger = logging.getLogger(__name__)


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; long texts are encoded without holding the interpreter
    lock.

    Attributes:
        bos_token, eos_token: Beginning and end of sequence as text; empty when the model has none.
        model_size: How many tokens the model knows; None if unknown. Ids from there on are of no use.
        added_ids: Tokens beside those that text is made of.
        special_ids: Added tokens that `skip_special_tokens` leaves out.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, *, bos_token: str = "", eos_token: str = "", model_size: int | None = None
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._bytes_of = bytes_of_token(core)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.model_size = model_size
        added = core.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, t in added.items() if t.special)
        self._max_characters = 2 * max((len(piece) for piece in core.get_vocab(with_added_tokens=True)), default=1)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their text, those that the model knows."""
        known = [token for token in self.special_ids if self.model_size is None or token < self.model_size]
        return {self._core.id_to_token(token) or "": token for token in sorted(known)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may be padded beyond it."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_id(self) -> int:
        """The largest id of a token: some may be unused, or stand for a token that has another one too."""
        return max(self._core.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self._core.token_to_id(self.bos_token) if self.bos_token else None

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self._core.token_to_id(self.eos_token) if self.eos_token else None

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The tokens that `encode` puts before a text and behind it, such as a beginning-of-sequence token."""
        return _around(self._core)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with what the model puts around it, such as a
        beginning-of-sequence token. Raises RequestError if the text has half a surrogate pair, which is no text in any
        encoding."""
        return self.encode_each([text], add_special_tokens)[0]

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each of several texts, as by `encode`."""
        with _unicode_checked():  # the batch call lets other threads run meanwhile, the single one does not
            encoded = self._core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [each.ids for each in encoded]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], limits: PairLimits = WHOLE_PAIRS
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids of each pair of texts, with what the model puts around and between them, and the type of each
        token: 0 or 1. Raises RequestError as `encode` does."""
        with _unicode_checked():
            return encode_pairs(self._core, pairs, limits)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids outside of the vocabulary add nothing."""
        if len(ids) > LONG_DECODE:  # see `encode`
            return self._core.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None if it has no such token."""
        return self._core.token_to_id(token)

    def token(self, token: int) -> str | None:
        """A token as the vocabulary writes it."""
        return self._core.id_to_token(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text that stands before it."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._bytes_of(token)
        return known

    def whole_text(self, token: int) -> str | None:
        """The text a token adds to the text before it; None if it does not add whole characters."""
        try:
            return self._texts[token]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token] = text
        return text

    def first_token_bytes(self, token: int) -> bytes:
        """The bytes of a token at the very beginning of a text, where some decoders drop its space."""
        plain = self.token_bytes(token)
        if not plain.startswith(b" "):
            return plain
        return self._core.decode([token], skip_special_tokens=False).encode()

    def fewest_tokens(self, text: str) -> int:
        """A cheap lower bound on the length of `encode(text)`, for refusing absurd texts before encoding them."""
        return len(text) // self._max_characters

    def end_of(self, text: str, tokens: int, *, first: bool = False) -> str:
        """The end (or the beginning) of a text, by far more than its last (or first) tokens may take, so that the
        cut makes no difference to them."""
        length = tokens * self._max_characters + CUT_MARGIN
        return text[:length] if first else text[-length:]


@contextmanager
def _unicode_checked() -> Iterator[None]:
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestError("The text is not valid Unicode: it has an unpaired surrogate.") from error


def load_tokenizer(directory: str | Path, model_size: int | None = None) -> Tokenizer:
    """The tokenizer in a model directory. Raises CheckpointError if there is none, or it is broken."""
    directory = Path(directory)
    settings = read_settings(directory)
    core = load_core(directory, settings)
    _add_tokens(core, settings, directory)
    bos, eos = settings.token("bos_token"), settings.token("eos_token")
    adds_bos, adds_eos = settings.flag("add_bos_token"), settings.flag("add_eos_token")
    if not (directory / "tokenizer.json").exists() and any((directory / name).exists() for name in SENTENCEPIECE):
        bos, eos = bos or _known(core, "<s>"), eos or _known(core, "</s>")
        adds_bos, adds_eos = settings.flag("add_bos_token", True), settings.flag("add_eos_token", False)
    _wrap_texts(core, (bos, adds_bos), (eos, adds_eos))
    return Tokenizer(core, bos_token=bos, eos_token=eos, model_size=model_size)


def _add_tokens(core: tokenizers.Tokenizer, settings: TokenizerSettings, directory: Path) -> None:
    """Give the tokens of the settings their ids and flags, and make those special that are named so."""
    for number, token in settings.added.items():
        known = core.token_to_id(token.content)
        if known is None:
            _add_at(core, number, token, directory)
        elif known != number:
            logger.warning(
                "%s: %r is token %d in the tokenizer and %d in its settings: it stays %d",
                directory, token.content, known, number, known,
            )  # fmt: skip
        elif repr(core.get_added_tokens_decoder().get(number)) != repr(token):
            core.add_tokens([token])
    special = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    for text in settings.special:
        if text not in special and core.token_to_id(text) is not None:
            core.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _add_at(core: tokenizers.Tokenizer, number: int, token: AddedToken, directory: Path) -> None:
    """Add a token that the tokenizer file lacks at its id: ids before it that no file lists are filled."""
    size = core.get_vocab_size(with_added_tokens=True)
    if number < size or number - size > _MAX_UNLISTED:
        logger.warning(
            "%s: %r cannot be token %d, as added_tokens_decoder says, in a tokenizer of %d tokens: it is left out",
            directory, token.content, number, size,
        )  # fmt: skip
        return
    filling = [AddedToken(f"<|unlisted_{each}|>", normalized=False) for each in range(size, number)]
    core.add_tokens([*filling, token])
    if (got := core.token_to_id(token.content)) != number:
        raise CheckpointError(f"{directory}: {token.content!r} became token {got}, and not {number} as it is listed.")


def _wrap_texts(core: tokenizers.Tokenizer, bos: tuple[str, bool | None], eos: tuple[str, bool | None]) -> None:
    """Put the beginning and the end of sequence around texts as the settings say, each on its own side; None to do
    as the tokenizer file does."""
    before, after = _around(core)
    wanted = before, after
    for side, (token, adds) in enumerate((bos, eos)):
        number = core.token_to_id(token) if token else None
        if adds is None or number is None:
            continue
        others = [each for each in wanted[side] if each != number]
        whole = [number, *others] if side == 0 else [*others, number]
        kept = whole if adds else others
        wanted = (kept, wanted[1]) if side == 0 else (wanted[0], kept)
    if wanted == (before, after):
        return
    names = [[core.id_to_token(number) or "" for number in side] for side in wanted]
    ids = {name: core.token_to_id(name) for side in names for name in side}
    core.post_processor = processors.TemplateProcessing(
        single=[*names[0], "$A", *names[1]], special_tokens=list(ids.items())
    )


def _around(core: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer file puts before and behind a text."""
    plain, whole = (core.encode("a", add_special_tokens=each).ids for each in (False, True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def _known(core: tokenizers.Tokenizer, token: str) -> str:
    return token if core.token_to_id(token) is not None else ""


def bad_word_tokens(tokenizer: Tokenizer | None, words: Sequence[str] | None) -> list[list[int]]:
    """Each word at the beginning of a text and, where that is as long in tokens, behind a space: vLLM's rule. A text
    can be made of tokens in other ways as well, which this does not forbid. Raises RequestError without a tokenizer."""
    if not words:
        return []
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer: there is none here.", param="bad_words")
    found: list[list[int]] = []
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    encoded = tokenizer.encode_each(texts, add_special_tokens=False)
    for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        if not plain:
            raise RequestError("bad_words has a text without tokens.", param="bad_words")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
