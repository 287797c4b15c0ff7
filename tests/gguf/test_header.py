"""Headers: read as they are written, and whatever is wrong with one is an error that says so, at once and in little
memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.compute.gguf.header import read_header
from quire.errors import CheckpointError
from tests.gguf.bytes import ARRAY, BOOL, F32, I32, STRING, U32, file, string, tensor

VALID = file(
    {
        "general.architecture": (STRING, "llama"),
        "llama.block_count": (U32, 2),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "ü", "<s>"])),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.5, -1.0, 0.0])),
        "flag": (BOOL, True),
    },
    [tensor("a", [4, 2]), tensor("b", [32, 3], kind=8, offset=32)],
    bytes(32 + 3 * 34),
)


def read(content: bytes, directory: Path) -> object:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return read_header(path)


def test_what_the_gguf_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", False)
    writer.add_array("a.list", [1, 2, 3])
    writer.add_token_list(["x", "äß", ""])
    writer.add_custom_alignment(64)
    blocks = np.arange(3 * 2 * 34, dtype=np.uint8).reshape(3, 68)
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("f", np.ones((2, 3, 5), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert header.metadata["a.number"] == 7
    assert header.metadata["a.float"] == 0.5
    assert header.metadata["a.flag"] is False
    assert header.metadata["a.list"] == [1, 2, 3]
    assert header.metadata["tokenizer.ggml.tokens"] == ["x", "äß", ""]
    q, f = header.tensors["q"], header.tensors["f"]
    assert (q.shape, q.form.name, q.nbytes) == ((3, 64), "Q8_0", blocks.nbytes)
    assert (f.shape, f.form.name, f.rows, f.row_bytes) == ((2, 3, 5), "F16", 6, 10)
    assert q.offset % 64 == f.offset % 64 == 0
    content = path.read_bytes()
    assert content[q.offset : q.offset + q.nbytes] == blocks.tobytes()


def test_a_file_by_the_book_is_read(tmp_path: Path) -> None:
    read(VALID, tmp_path)


FLAT = {"general.architecture": (STRING, "llama")}
ENDLESS = struct.pack("<Q", 1 << 62)
NUMBERS = file({"a": (ARRAY, (U32, []))})


def with_array(kind: int, count: int) -> bytes:
    """The array of NUMBERS with another type and count."""
    return NUMBERS.replace(struct.pack("<IQ", U32, 0), struct.pack("<IQ", kind, count))


def with_value(kind: int) -> bytes:
    """A value of this type, of zeros."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("x") + struct.pack("<I", kind) + bytes(32)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "another format": (b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "version 1": (file(FLAT, version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(100), "big-endian"),
    "more metadata than bytes": (file(FLAT, counts=(0, 1 << 60)), "declares"),
    "more tensors than bytes": (file(FLAT, counts=(1 << 60, 1)), "declares"),
    "one entry too few": (file(FLAT, counts=(0, 2)), "declares|cut short|without a name"),
    "endless key": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + ENDLESS + bytes(64), "cut short"),
    "endless array": (with_array(U32, 1 << 61), "declares"),
    "endless strings": (with_array(STRING, 3) + ENDLESS * 3, "cut short|declares"),
    "array of an unknown type": (with_array(77, 0), "unknown type 77"),
    "arrays in arrays": (file({"a": (ARRAY, (ARRAY, [(ARRAY, [(U32, [])])]))}), "unknown type 9"),
    "unknown type of value": (with_value(99), "unknown type 99"),
    "boolean of 2": (with_value(BOOL)[:-32] + b"\x02" + bytes(31), "boolean of 2"),
    "alignment of 0": (file(FLAT | {"general.alignment": (U32, 0)}), "general.alignment"),
    "alignment of 3": (file(FLAT | {"general.alignment": (U32, 3)}), "general.alignment"),
    "alignment of text": (file(FLAT | {"general.alignment": (STRING, "32")}), "general.alignment"),
    "huge alignment": (file(FLAT | {"general.alignment": (U32, 1 << 31)}), "general.alignment"),
    "no dimensions": (file(FLAT, [tensor("a", [])]), "0 dimensions"),
    "five dimensions": (file(FLAT, [tensor("a", [1] * 5)]), "5 dimensions"),
    "size of 0": (file(FLAT, [tensor("a", [4, 0])]), "sizes"),
    "huge size": (file(FLAT, [tensor("a", [1 << 62])]), "sizes"),
    "product beyond 64 bits": (file(FLAT, [tensor("a", [1 << 40, 1 << 40, 4])]), "cut short"),
    "half a block": (file(FLAT, [tensor("a", [48, 2], kind=8)], bytes(200)), "whole blocks of Q8_0"),
    "beyond the end": (file(FLAT, [tensor("a", [8, 2])], bytes(63)), "cut short"),
    "offset beyond the end": (file(FLAT, [tensor("a", [8], offset=1 << 40)], bytes(64)), "cut short"),
    "offset that wraps": (file(FLAT, [tensor("a", [8], offset=(1 << 64) - 32)], bytes(64)), "cut short"),
    "offset between": (file(FLAT, [tensor("a", [8], offset=4)], bytes(64)), "multiple of 32"),
    "overlap": (file(FLAT, [tensor("a", [16]), tensor("b", [16], offset=32)], bytes(128)), "overlaps"),
    "twice": (file(FLAT, [tensor("a", [8]), tensor("a", [8], offset=32)], bytes(64)), "twice"),
    "unknown tensor type": (file(FLAT, [tensor("a", [256], kind=16)], bytes(300)), "IQ2_XXS.*Q4_K_M"),
    "type from the future": (file(FLAT, [tensor("a", [256], kind=999)], bytes(300)), "number 999"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers_are_refused(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message):
        read(content, tmp_path)


@pytest.mark.parametrize("size", range(0, len(VALID) - 1, 7))
def test_a_file_cut_anywhere_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        read(VALID[:size], tmp_path)


def test_flipped_bytes_harm_nobody(tmp_path: Path) -> None:
    """Every single byte, and many pairs: read or refused, in little memory."""
    generator = random.Random(7)
    tracemalloc.start()
    for number in range(3000):
        content = bytearray(VALID)
        for _ in range(1 + number % 2):
            content[generator.randrange(len(content))] = generator.choice((0, 1, 0x7F, 0x80, 0xFF))
        try:
            read(bytes(content), tmp_path)
        except CheckpointError:
            continue
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_many_small_things_are_refused_before_they_are_made(tmp_path: Path) -> None:
    """A file of 100 MB that declares as many empty strings as it has room for."""
    count = 12_000_000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", ARRAY, STRING, count)
    path = tmp_path / "model.gguf"
    with path.open("wb") as out:
        out.write(head)
        out.truncate(len(head) + 8 * count + 64)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="declares"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_signed_numbers_keep_their_sign(tmp_path: Path) -> None:
    header = read(file({"a": (I32, -5), "b": (ARRAY, (I32, [-1, 2]))}), tmp_path)
    assert header.metadata == {"a": -5, "b": [-1, 2]}  # type: ignore[attr-defined]
