"""Text to token ids and back.

Owns loading a tokenizer from a model directory (`tokenizer.json` or `tokenizer.model`) and its special tokens. Knows
nothing about requests, chat or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, processors

from quire.errors import CheckpointError, RequestError
from quire.text import spm_model
from quire.text.token_bytes import bytes_of_token

LONG_DECODE = 1_000
"""More tokens are decoded while other threads run."""

CUT_MARGIN = 10_000
"""Characters that a text is encoded beyond the tokens that are wanted of it."""


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; long texts are encoded without holding the interpreter
    lock.

    Attributes:
        bos_token, eos_token: Beginning and end of sequence as text; empty when the model has none.
        added_ids: Tokens beside those that text is made of.
        special_ids: Those of them that `skip_special_tokens` leaves out.
    """

    def __init__(self, core: tokenizers.Tokenizer, *, bos_token: str = "", eos_token: str = "") -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self._bytes_of = bytes_of_token(core)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.bos_token = bos_token
        self.eos_token = eos_token
        added = core.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, t in added.items() if t.special)
        self._most_characters = 2 * max((len(piece) for piece in core.get_vocab(with_added_tokens=True)), default=1)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens by their text."""
        return {self._core.id_to_token(token) or "": token for token in sorted(self.special_ids)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may be padded beyond it."""
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self._core.token_to_id(self.bos_token) if self.bos_token else None

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self._core.token_to_id(self.eos_token) if self.eos_token else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_special_tokens: With what the model puts around a text, such as a beginning-of-sequence token.

        Raises:
            RequestError: The text has half a surrogate pair, which is no text in any encoding.
        """
        return self.encode_each([text], add_special_tokens)[0]

    def encode_each(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each of several texts; see `encode`."""
        try:  # the batch call lets other threads run meanwhile, the single one does not
            encoded = self._core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [each.ids for each in encoded]
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("The text is not valid Unicode: it has an unpaired surrogate.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids outside of the vocabulary add nothing."""
        if len(ids) > LONG_DECODE:  # see `encode`
            return self._core.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None if it has none such."""
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
        """The text a token adds to the text that stands before it; None where that is no whole characters."""
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
        return len(text) // self._most_characters

    def end_of(self, text: str, tokens: int, *, first: bool = False) -> str:
        """As much of a text's end (or of its beginning) as its last (or first) tokens may take and far more, so that
        where it was cut makes no difference to them."""
        length = tokens * self._most_characters + CUT_MARGIN
        return text[:length] if first else text[-length:]


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer in a model directory.

    Raises:
        CheckpointError: There is none, or it is broken.
    """
    directory = Path(directory)
    settings = read_json(directory / "tokenizer_config.json")
    core = _load_core(directory, settings)
    try:
        _add_missing_tokens(core, settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: added_tokens_decoder is malformed.") from error
    bos, eos = (_token_text(settings.get(name)) for name in ("bos_token", "eos_token"))
    if not (directory / "tokenizer.json").exists():
        bos, eos = bos or _known(core, "<s>"), eos or _known(core, "</s>")
        settings = {"add_bos_token": True, "add_eos_token": False} | settings
    _wrap_texts(core, settings, bos, eos)
    return Tokenizer(core, bos_token=bos, eos_token=eos)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file.

    Raises:
        CheckpointError: The file is no JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as a JSON object: {error}.") from error


def _load_core(directory: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    json_file, spm_file = directory / "tokenizer.json", directory / "tokenizer.model"
    if json_file.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(json_file))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{json_file} is not a readable tokenizer: {error}.") from error
    if spm_file.exists():
        return spm_model.load(
            spm_file, legacy=bool(settings.get("legacy", True)), stripping=_stripping(directory, settings)
        )
    raise CheckpointError(
        f"{directory} has neither tokenizer.json nor tokenizer.model. Name a directory that has one with --tokenizer."
    )


def _stripping(directory: Path, settings: dict[str, Any]) -> list[str]:
    """Tokens that take the white space behind them."""
    listed = settings.get("added_tokens_decoder") or {}
    try:
        return [str(entry["content"]) for entry in listed.values() if entry.get("rstrip")]
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: added_tokens_decoder is malformed.") from error


def _add_missing_tokens(core: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Add what tokenizer_config.json lists beyond the tokenizer file, in the order of its ids, and make the tokens that
    it names (beginning, end …) special."""
    listed = settings.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if core.token_to_id(entry["content"]) is None:
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "normalized", "single_word")}
            core.add_tokens([AddedToken(entry["content"], special=bool(entry.get("special")), **flags)])
    added = {token.content for token in core.get_added_tokens_decoder().values()}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        text = _token_text(settings.get(name))
        if text and text not in added and core.token_to_id(text) is not None:
            core.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _wrap_texts(core: tokenizers.Tokenizer, settings: dict[str, Any], bos: str, eos: str) -> None:
    """Where tokenizer_config.json says add_bos_token or add_eos_token, that decides over the tokenizer file."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    around = [bos if settings.get("add_bos_token") else "", eos if settings.get("add_eos_token") else ""]
    single = " ".join([*around[:1], "$A", *around[1:]]).split()
    ids = [(token, core.token_to_id(token)) for token in dict.fromkeys(around) if token]
    if all(number is not None for _, number in ids):
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _token_text(entry: Any) -> str:
    """A special token is written as a string or as an object with its content."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _known(core: tokenizers.Tokenizer, token: str) -> str:
    return token if core.token_to_id(token) is not None else ""
