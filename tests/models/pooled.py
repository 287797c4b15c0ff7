"""Models that make vectors or values of texts, against transformers', texts of several lengths in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoints import TINY, edit_config, make_tiny
from tests.models.forward import Loaded, states_of_rows

LENGTHS = (1, 40, 7, 70, 23)
"""Tokens of texts; longer than windows."""
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(6, TINY["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def near(ours: Tensor, theirs: Tensor, most: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    assert ((ours - theirs).abs().max() / theirs.abs().max()) < most


def make_pooled(directory: Path, architecture: str, row: dict[str, Any]) -> tuple[Path, nn.Module]:
    """The checkpoint of a row, and transformers' model of it, or of one that is like it."""
    row = dict(row)
    like = row.pop("like", None)
    kind = architecture
    if architecture == "HF_ColBERT":
        kind = "BertForTokenClassification"
    elif like is not None:
        head = next((head for head in HEADS if architecture.endswith(head)), "Model")
        kind = f"{like}{head}"
    make_tiny(directory, kind, **row)
    reference = getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    edit_config(directory, {"architectures": [architecture]})
    if architecture == "HF_ColBERT":
        _rename_classifier(directory, reference)
    return directory, reference.eval()


def _rename_classifier(directory: Path, reference: Any) -> None:
    """ColBERT's vectors of tokens are a classifier's values without a bias, by another name."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["classifier.bias"]
    tensors["linear.weight"] = tensors.pop("classifier.weight")
    save_file(tensors, file)
    reference.classifier.bias = None


def types_of(loaded: Loaded, rows: list[Tensor]) -> list[Tensor] | None:
    """The second half of each text is of type 1, where there are types."""
    return [torch.arange(len(row)) * 2 // len(row) for row in rows] if loaded.spec.token_types > 1 else None


def outputs_of(loaded: Loaded, rows: list[Tensor]) -> list[Tensor]:
    """What a model makes of texts: states [length, hidden], or its head's values of the states that it reads."""
    types = types_of(loaded, rows)
    states = states_of_rows(loaded, rows, None if types is None else torch.cat(types))
    head = loaded.spec.text_head
    if head is None:
        return states
    read = {
        "cls": lambda own: own[:1],
        "last": lambda own: own[-1:],
        "mean": lambda own: own.mean(0, keepdim=True),
        "all": lambda own: own,
    }[head.pooling]
    return [loaded.model.logits(read(own)) for own in states]


def reference_outputs(reference: nn.Module, loaded: Loaded, rows: list[Tensor]) -> list[Tensor]:
    """The same of transformers' model, text by text."""
    types, found = types_of(loaded, rows), []
    for number, row in enumerate(rows):
        more = {} if types is None else {"token_type_ids": types[number][None]}
        if loaded.spec.two_sided and "Llama" in type(reference).__name__:
            found.append(_of_both_sides(reference, row))
            continue
        output = reference(row[None], **more)
        if loaded.spec.text_head is None:
            found.append(output.last_hidden_state[0])
        else:
            found.append(output.logits[0] if loaded.spec.text_head.pooling == "all" else output.logits)
    return found


def _of_both_sides(reference: nn.Module, row: Tensor) -> Tensor:
    """What a Llama without a causal mask makes of a text."""
    base: Any = getattr(reference, "model", reference)
    states: Tensor = base(row[None], attention_mask=torch.zeros(1, 1, len(row), len(row))).last_hidden_state
    if base is reference:
        return states[0]
    score: nn.Linear = reference.score  # type: ignore[assignment]
    return score(states.mean(1))  # type: ignore[no-any-return]


def stored_weights(reference: nn.Module, loaded: Loaded) -> int:
    """Weights that the model reads: all but the pooler of a model without a head."""
    bare = loaded.spec.text_head is None
    return sum(each.numel() for name, each in reference.named_parameters() if not (bare and "pooler" in name))
