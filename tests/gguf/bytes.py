"""GGUF files written byte by byte, so that a test can break any of them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value without its type; of an array, `content` is its elements' type and they."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        inner, elements = content
        return struct.pack("<IQ", inner, len(elements)) + b"".join(value(inner, each) for each in elements)
    return struct.pack("<" + _CODES[kind], content)


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry; the shape in the file's order, columns first."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    metadata: Mapping[str, tuple[int, Any]],
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file.

    Args:
        metadata: Type and value by key.
        tensors: Their entries.
        data: Behind the header.
        counts: Of tensors and metadata, if they are to be wrong.
    """
    declared = counts or (len(tensors), len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, *declared)
    for key, (kind, content) in metadata.items():
        head += string(key) + struct.pack("<I", kind) + value(kind, content)
    head += b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


SMALLEST: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (U32, 1),
    "llama.embedding_length": (U32, 32),
    "llama.feed_forward_length": (U32, 32),
    "llama.attention.head_count": (U32, 2),
    "llama.context_length": (U32, 64),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "tokenizer.ggml.model": (STRING, "gpt2"),
    "tokenizer.ggml.pre": (STRING, "gpt-2"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "b", "ab", "<|im_end|>"])),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [1, 1, 1, 3])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
    "tokenizer.ggml.eos_token_id": (U32, 3),
}
"""Metadata of a model with a tokenizer."""
EMBEDDING = tensor("token_embd.weight", [32, 4])
EMBEDDING_DATA = bytes(4 * 32 * 4)


def smallest(**changed: tuple[int, Any] | None) -> bytes:
    """A model of an embedding alone; keys with `__` for dots replace or, as None, remove metadata."""
    metadata = dict(SMALLEST)
    for key, entry in changed.items():
        metadata.pop(key.replace("__", "."), None)
        if entry is not None:
            metadata[key.replace("__", ".")] = entry
    return file(metadata, [EMBEDDING], EMBEDDING_DATA)
