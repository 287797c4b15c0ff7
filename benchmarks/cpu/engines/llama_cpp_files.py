"""GGUF files of a checkpoint, each made once: in bf16 by the `gguf` package, others from that by llama.cpp's quantizer.

python -m engines.llama_cpp_files CHECKPOINT TYPE    # such as Q8_0 or Q4_K_M; prints the path
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from checkpoints import config_of, read_tensor, tensor_shapes


def quantized(checkpoint: Path, name: str) -> Path:
    """The checkpoint in one of llama.cpp's mixtures of types."""
    path = checkpoint / f"model-{name}.gguf"
    if not path.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        partial = path.with_suffix(".partial")
        source = converted(checkpoint)
        if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), params):
            raise RuntimeError(f"llama.cpp cannot make {name} of {source}")
        os.replace(partial, path)
    return path


def converted(checkpoint: Path) -> Path:
    """The checkpoint in bf16."""
    path = checkpoint / "model-bf16.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        _convert(checkpoint, partial)
        os.replace(partial, path)
    return path


def _convert(checkpoint: Path, path: Path) -> None:
    config = config_of(checkpoint)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, shape in tensor_shapes(config):
        bits = read_tensor(checkpoint, name)
        if "q_proj" in name or "k_proj" in name:
            bits = _pairs_side_by_side(bits, config["head_dim"])
        target = names.get_name(name, try_suffixes=(".weight",))
        if len(shape) == 1:  # norms are computed in fp32
            writer.add_tensor(target, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            rows = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(target, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs_side_by_side(weight: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """[heads · head_dim, columns]: llama.cpp rotates neighbours where the checkpoint has halves of a head."""
    columns = weight.shape[1]
    return weight.reshape(-1, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(-1, columns)


if __name__ == "__main__":
    print(quantized(Path(sys.argv[1]), sys.argv[2]))
