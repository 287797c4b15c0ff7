"""The bytes that one token adds to the text, by kind of decoder; with them, detokenizing is a concatenation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

BytesOfToken = Callable[[int], bytes]
"""From a token id to the bytes it adds when other text stands before it."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_token(core: tokenizers.Tokenizer) -> BytesOfToken:
    """How this tokenizer's decoder turns one token into bytes; exact for byte-level and byte-fallback decoders."""
    kinds = _kinds(json.loads(core.to_str()).get("decoder"))
    if "ByteLevel" in kinds:
        return _byte_level(core)
    if "ByteFallback" in kinds:
        return _byte_fallback(core)
    return _by_difference(core)


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    inner = [kind for part in decoder.get("decoders", []) for kind in _kinds(part)]
    return [decoder["type"], *inner]


def _byte_level(core: tokenizers.Tokenizer) -> BytesOfToken:
    alphabet = _byte_level_alphabet()

    def of(token: int) -> bytes:
        piece = core.id_to_token(token) or ""
        try:
            return bytes([alphabet[character] for character in piece])
        except KeyError:  # an added token that is written as it is
            return piece.encode()

    return of


def _byte_fallback(core: tokenizers.Tokenizer) -> BytesOfToken:
    def of(token: int) -> bytes:
        piece = core.id_to_token(token) or ""
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    return of


def _by_difference(core: tokenizers.Tokenizer) -> BytesOfToken:
    """The bytes that a token adds behind an ordinary one, for any other decoder."""
    added = core.get_added_tokens_decoder()
    anchor = next((i for i in range(core.get_vocab_size()) if i not in added and core.decode([i])), 0)
    before = core.decode([anchor], skip_special_tokens=False)

    def of(token: int) -> bytes:
        return core.decode([anchor, token], skip_special_tokens=False).removeprefix(before).encode()

    return of


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
