"""Whether a checkpoint that ties its head to the embedding has another head nevertheless. Imports no torch.

Fine-tunes are published with `tie_word_embeddings` of their base model and a head of their own. As in transformers 5,
two tensors of different values are not one, whatever config.json says.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire.compute.gguf.header import have_equal_bytes
from quire.errors import CheckpointError
from quire.models.weights.headers import LocatedTensor, located_tensors, text_name
from quire.models.weights.safetensors_files import find_files

HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight", "wte.weight")
_MODULE = "lm_head."


def has_own_head(directory: Path) -> bool:
    """Whether the files have a head of other values, shape or form than the embedding. Files that cannot be read have
    none, which reading the weights will say.
    """
    try:
        located = {text_name(name) or name: tensor for name, tensor in located_tensors(find_files(directory))}
    except (CheckpointError, OSError, ValueError, TypeError, KeyError, AttributeError, json.JSONDecodeError):
        return False
    embedding = next((located[name] for name in EMBEDDINGS if name in located), None)
    heads = [name for name in located if name.startswith(_MODULE)]
    if embedding is None or not heads:
        return False
    return heads != [HEAD] or not _are_equal(embedding, located[HEAD])


def _are_equal(one: LocatedTensor, other: LocatedTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.size == other.size and have_equal_bytes(one.path, one.offset, other.path, other.offset, one.size)
