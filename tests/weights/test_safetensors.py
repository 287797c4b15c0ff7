"""Reading safetensors: one file or many, every dtype, windows; and files that lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.weights.checkpoint import StoredTensor, WeightSpec, check_weights
from quire.models.weights.safetensors import SafetensorsCheckpoint
from quire.models.weights.safetensors_files import INDEX, SINGLE
from quire.models.weights.standard_names import with_standard_names

A, B = torch.arange(12.0).view(3, 4), torch.arange(5.0) - 2


def read(
    checkpoint: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **window: Any
) -> Tensor:
    out = torch.full(shape, -1, dtype=dtype)
    checkpoint.read(name, out, **window)
    return out


def write_shards(directory: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_dtypes_are_converted(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 20).to(stored)
    save_file({"a": values}, tmp_path / SINGLE)
    assert torch.equal(read(SafetensorsCheckpoint(tmp_path), "a", (20,), wanted), values.to(wanted))


def test_windows(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / SINGLE)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert torch.equal(read(checkpoint, "a", (3, 4)), A)
    assert torch.equal(read(checkpoint, "a", (2, 3), start=(1, 1)), A[1:3, 1:4])
    assert torch.equal(read(checkpoint, "a", (2, 4), torch.bfloat16), A[:2].bfloat16())


def test_shards_of_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B}})
    save_file({"stray": A}, tmp_path / "stray.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.contents() == {"a": StoredTensor((3, 4), "F32"), "b": StoredTensor((5,), "F32")}
    assert torch.equal(read(checkpoint, "b", (5,)), B)
    checkpoint.close()


def test_files_without_an_index(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    save_file({"a": A}, tmp_path / "consolidated.safetensors")
    assert set(SafetensorsCheckpoint(tmp_path).contents()) == {"a", "b"}
    save_file({"a": A}, tmp_path / "three.safetensors")
    with pytest.raises(CheckpointError, match="'a' stands in another file"):
        SafetensorsCheckpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x-1.safetensors": {"a": A}, "x-2.safetensors": {"b": B}})
    (tmp_path / "x-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not there \(x-2\.safetensors\)"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["x"]}}', '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": ""}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_broken_index_is_refused(index: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=INDEX):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model-q4.gguf"])
def test_other_formats_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"only as {name}.*safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors.*dummy"):
        SafetensorsCheckpoint(tmp_path)


def entry(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: dict[str, dict[str, Any]] = {
    "beyond the file": {"a": entry([40], [0, 160])},
    "short of the file": {"a": entry([2], [0, 8])},
    "size is not shape": {"a": entry([2], [0, 16])},
    "overlap": {"a": entry([3], [0, 12]), "b": entry([2], [8, 16])},
    "same place": {"a": entry([4], [0, 16]), "b": entry([4], [0, 16])},
    "gap": {"a": entry([1], [0, 4]), "b": entry([2], [8, 16])},
    "overflow": {"a": entry([2**62, 4], [0, 16])},
    "backwards": {"a": entry([4], [16, 0])},
    "negative": {"a": entry([-4], [0, 16])},
    "no such dtype": {"a": entry([4], [0, 16], "P64")},
    "no offsets": {"a": {"dtype": "F32", "shape": [4]}},
    "no object": {"a": 3},
}


def file_of(header: bytes, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file_of(json.dumps(HOSTILE[kind]).encode()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is broken or cut short"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", *(file_of(b"{}", length=n) for n in (2**63, 2**40)), *map(file_of, (b"{", b"\xff\xfe", b"[]"))],
)
def test_broken_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match="download it again"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_truncated_files_are_refused(kept: float, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(50, 50)}, tmp_path / SINGLE)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match="cut short"):
        SafetensorsCheckpoint(tmp_path)


# --- what a model needs against what there is -----------------------------------------------------------------------


def test_all_differences_are_listed_at_once(tmp_path: Path) -> None:
    save_file({"a": A, "b": B, "c": torch.zeros(2, dtype=torch.int8), "extra": B.clone()}, tmp_path / SINGLE)
    specs = [WeightSpec("a", (4, 3)), WeightSpec("b", (5,)), WeightSpec("c", (2,)), WeightSpec("d", (7, 1))]
    with pytest.raises(CheckpointError) as caught:
        check_weights(SafetensorsCheckpoint(tmp_path), specs, "SomeModel")
    message = caught.value.message
    assert "4 differences" in message
    assert "a: expected [4, 3], found [3, 4]" in message
    assert "c: dtype I8 is not one of" in message
    assert "d: missing, expected [7, 1]" in message
    assert "extra: found [5], but SomeModel has no such weight" in message
    assert "\n  b:" not in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / SINGLE)
    specs = [WeightSpec("a", (3, 4)), *(WeightSpec(f"n{i}", (1,)) for i in range(30))]
    with pytest.raises(CheckpointError, match="30 differences") as caught:
        check_weights(SafetensorsCheckpoint(tmp_path), specs, "SomeModel")
    assert "… and 22 more" in caught.value.message
    assert len(caught.value.message.splitlines()) == 11


def test_leftovers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "a"]
    save_file({name: B.clone() for name in names}, tmp_path / SINGLE)
    check_weights(SafetensorsCheckpoint(tmp_path), [WeightSpec("a", (5,))], "SomeModel")


def test_names_without_their_prefix(tmp_path: Path) -> None:
    tensors = {"embed_tokens.weight": A, "norm.weight": B, "lm_head.weight": A + 1}
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = with_standard_names(SafetensorsCheckpoint(tmp_path))
    assert set(checkpoint.contents()) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert torch.equal(read(checkpoint, "model.norm.weight", (5,)), B)
    assert torch.equal(read(checkpoint, "lm_head.weight", (1, 4), start=(2, 0)), A[2:] + 1)
    checkpoint.close()


def test_a_bare_gpt2_has_its_prefix_and_its_masks_are_passed_over(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    tensors = {"wte.weight": weight, "h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.ones(())}
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = with_standard_names(SafetensorsCheckpoint(tmp_path))
    check_weights(checkpoint, [WeightSpec("transformer.wte.weight", (3, 2))], "GPT2LMHeadModel")
    checkpoint.read("transformer.wte.weight", out := torch.empty(3, 2))
    assert torch.equal(out, weight)


def test_stacked_experts_are_seen_one_by_one(tmp_path: Path) -> None:
    gate_up, down, other = torch.randn(3, 8, 5), torch.randn(3, 5, 4), torch.randn(3, 5)
    names = ("m.experts.gate_up_proj", "m.experts.down_proj", "m.gate.weight")
    save_file(dict(zip(names, (gate_up, down, other), strict=True)), tmp_path / SINGLE)
    checkpoint = with_standard_names(SafetensorsCheckpoint(tmp_path))
    shapes = {"gate": (4, 5), "up": (4, 5), "down": (5, 4)}
    specs = [WeightSpec(f"m.experts.{i}.{part}_proj.weight", shape) for i in range(3) for part, shape in shapes.items()]
    check_weights(checkpoint, [*specs, WeightSpec("m.gate.weight", (3, 5))], "Qwen3MoeForCausalLM")
    for i in range(3):
        parts = {"gate": gate_up[i, :4], "up": gate_up[i, 4:], "down": down[i]}
        for part, expected in parts.items():
            checkpoint.read(f"m.experts.{i}.{part}_proj.weight", out := torch.empty(shapes[part]))
            assert torch.equal(out, expected)
    checkpoint.read("m.experts.1.up_proj.weight", window := torch.empty(2, 3), (1, 2))
    assert torch.equal(window, gate_up[1, 5:7, 2:5])
    checkpoint.read("m.gate.weight", out := torch.empty(3, 5))
    assert torch.equal(out, other)


def test_stacked_experts_may_be_transposed_and_have_other_names(tmp_path: Path) -> None:
    """As Llama 4 stores them, and under Granite's names."""
    gate_up, down = torch.randn(3, 5, 8), torch.randn(3, 4, 5)
    save_file({"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down}, tmp_path / SINGLE)
    checkpoint = with_standard_names(
        SafetensorsCheckpoint(tmp_path), expert=("w1", "w3", "w2"), transposed_experts=True
    )
    assert checkpoint.contents()["m.experts.2.w3.weight"].shape == (4, 5)
    assert torch.equal(read(checkpoint, "m.experts.1.w1.weight", (4, 5)), gate_up[1, :, :4].T)
    assert torch.equal(read(checkpoint, "m.experts.2.w3.weight", (2, 3), start=(1, 2)), gate_up[2, 2:, 5:7].T)
    assert torch.equal(read(checkpoint, "m.experts.0.w2.weight", (2, 4), start=(3, 0)), down[0, :, 3:].T)
    other = tmp_path / "granite"
    other.mkdir()
    names = ("input_linear", "output_linear", "router.layer")
    stored = (gate_up.mT.contiguous(), down.mT.contiguous(), torch.randn(3, 5))
    save_file({f"x.block_sparse_moe.{n}.weight": t for n, t in zip(names, stored, strict=True)}, other / SINGLE)
    checkpoint = with_standard_names(SafetensorsCheckpoint(other))
    assert torch.equal(read(checkpoint, "x.block_sparse_moe.experts.1.up_proj.weight", (4, 5)), gate_up[1, :, 4:].T)
    assert torch.equal(read(checkpoint, "x.block_sparse_moe.router.weight", (3, 5)), stored[2])


def test_rows_of_several_tensors_are_those_of_one(tmp_path: Path) -> None:
    """As checkpoints of Kimi Linear store a convolution; windows may lie in one part or in several."""
    parts = {f"m.{name}.weight": torch.randn(rows, 1, 4) for name, rows in (("q", 3), ("k", 2), ("v", 5))}
    save_file(parts | {"m.o.weight": torch.randn(2, 2)}, tmp_path / SINGLE)
    joined = (("qkv.weight", ("q.weight", "k.weight", "v.weight")),)
    checkpoint = with_standard_names(SafetensorsCheckpoint(tmp_path), joined=joined)
    whole = torch.cat(list(parts.values()))
    assert {name: stored.shape for name, stored in checkpoint.contents().items()} == {
        "m.qkv.weight": (10, 1, 4),
        "m.o.weight": (2, 2),
    }
    assert torch.equal(read(checkpoint, "m.qkv.weight", (10, 1, 4)), whole)
    for first, rows in ((0, 3), (2, 2), (1, 6), (4, 6), (9, 1)):
        window = read(checkpoint, "m.qkv.weight", (rows, 1, 3), start=(first, 0, 1))
        assert torch.equal(window, whole[first : first + rows, :, 1:])
