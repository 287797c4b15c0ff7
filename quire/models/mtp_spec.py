"""Describes heads within checkpoints that predict one token more (multi-token prediction: DeepSeek-AI 2024,
"DeepSeek-V3 Technical Report", section 2.2). Does not import torch.

Such a head norms the embedding of the next token and the model's last state, makes one vector of both, and takes it
through a layer like the model's own. Embeddings and the head to logits are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quire.models.layer_spec import AttentionSpec, LatentSpec
from quire.models.spec import ModelSpec
from quire.models.weights.safetensors_files import read_headers

_PLAIN = (".weight", ".bias", "e_score_correction_bias")
"""Ends of names of tensors that are not quantized."""


@dataclass(frozen=True)
class MtpSpec:
    """How a kind of checkpoint stores its head, and in which order the head computes.

    Attributes:
        begin: What the names of the head's tensors begin with; {} stands for the number behind the model's last layer.
        parts: Beginnings of names behind that, each with the standard one. Tensors of no part belong to the model, or
            to further heads.
        left_out: Beginnings of names of tensors that the model has as well.
        state_first: Whether the state comes before the embedding.
        keeps_normed: Whether the head goes on from its normed state.
        has_norm: Whether there is a norm behind the layer.
        layer: The number behind the model's last layer.
    """

    begin: str
    parts: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...] = ()
    state_first: bool = False
    keeps_normed: bool = False
    has_norm: bool = True
    layer: int = 0

    def names_in(self, names: Iterable[str]) -> dict[str, str]:
        """Return the checkpoint's names of the head's tensors, by the names that the head's layers have."""
        found, begin = {}, self.begin.format(self.layer)
        for name in names:
            rest = name.removeprefix(begin)
            if rest == name or rest.startswith(self.left_out or "\0"):
                continue
            part = next((part for part in self.parts if rest.startswith(part[0])), None)
            if part is not None:
                found[f"model.layers.{self.layer}.{part[1]}{rest.removeprefix(part[0])}"] = name
        return found

    def weights(self, vocab_size: int, hidden: int) -> int:
        """Return the number of weights around the head's layer, beside the last norm's."""
        return 2 * hidden * hidden + 2 * hidden


_LIKE_A_LAYER = MtpSpec("model.layers.{}.", (("", ""),), left_out=("embed_tokens.", "shared_head.head."))
"""DeepSeek V3 and R1, GLM 4.5 and its successors."""
_QWEN = MtpSpec(
    "mtp.",
    (
        ("fc.", "eh_proj."),
        ("pre_fc_norm_embedding.", "enorm."),
        ("pre_fc_norm_hidden.", "hnorm."),
        ("norm.", "shared_head.norm."),
        ("layers.0.", ""),
    ),
    keeps_normed=True,
)
_MIMO = MtpSpec(
    "model.mtp_layers.0.",
    (
        ("input_proj.", "eh_proj."),
        ("token_layernorm.", "enorm."),
        ("hidden_layernorm.", "hnorm."),
        ("final_layernorm.", "shared_head.norm."),
        ("", ""),
    ),
    state_first=True,
    keeps_normed=True,
)
_ERNIE = MtpSpec(
    "model.mtp_",
    (("linear_proj.0.", "eh_proj."), ("emb_norm.0.", "enorm."), ("hidden_norm.0.", "hnorm."), ("block.0.", "")),
    has_norm=False,
)
_KINDS = (_LIKE_A_LAYER, _QWEN, _MIMO, _ERNIE)


def mtp_head(spec: ModelSpec, directory: Path, *, is_dummy: bool = False) -> ModelSpec | None:
    """Return the spec of the head that a model's checkpoint has; None if it has none.

    Args:
        spec: The model.
        directory: Its files.
        is_dummy: Whether weights are made up, so that config.json alone says whether there is a head.
    """
    number, names = len(spec.layers), read_headers(directory)
    layer = next((each for each in reversed(spec.layers) if isinstance(each.mixer, AttentionSpec | LatentSpec)), None)
    kinds = [replace(kind, layer=number) for kind in _KINDS]
    kind = next((kind for kind in kinds if f"model.layers.{number}.eh_proj.weight" in kind.names_in(names)), None)
    if is_dummy and kind is None:
        like_a_layer, qwen, *_ = kinds
        kind = qwen if spec.architecture.startswith(("Qwen3Next", "Qwen3_5")) else None
        kind = like_a_layer if spec.mtp_layers else kind
    if kind is None or layer is None:
        return None
    own = kind.names_in(names).values()
    own_norm = spec.family.modules.norm if kind.has_norm else ""
    modules = replace(spec.family.modules, layer=f"model.layers.{number}", norm=own_norm)
    return replace(
        spec,
        family=replace(spec.family, decoder="quire.models.mtp:MtpHead", modules=modules),
        layers=(layer,),
        head=kind,
        quantization=None if all(name.endswith(_PLAIN) for name in own) else spec.quantization,
        held=None,
        groups=None,
        mtp_layers=range(0),
        vision=None,
    )
