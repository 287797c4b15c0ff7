"""Describes heads within checkpoints that predict one token more (multi-token prediction: DeepSeek-AI 2024,
"DeepSeek-V3 Technical Report", section 2.2). Does not import torch.

Such a head norms the embedding of the next token and the model's last state, makes one vector of both, and takes it
through a layer like the model's own, or through two where a layer has only one part. Embeddings and the head to logits
are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.models.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MixtureSpec
from quire.models.recurrent_spec import NoMixerSpec
from quire.models.spec import ModelSpec
from quire.models.weights.safetensors_files import read_headers, text_name

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
        layers: Number of layers of the head. Of several, the standard names have their numbers behind `layer`.
        layer: The number behind the model's last layer.
    """

    begin: str
    parts: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...] = ()
    state_first: bool = False
    keeps_normed: bool = False
    has_norm: bool = True
    layers: int = 1
    layer: int = 0

    @property
    def layer_name(self) -> str:
        """What the standard names in layers begin with; {} stands for the number of one of several."""
        return f"model.layers.{self.layer}" + (".{}" if self.layers > 1 else "")

    def names_in(self, names: Iterable[str]) -> dict[str, str]:
        """Return the checkpoint's names of the head's tensors, by the names that the head's layers have."""
        found, begin = {}, self.begin.format(self.layer)
        for name in names:
            own = text_name(name) or name  # a model that also reads images has its layers within another
            rest = own.removeprefix(begin)
            if rest == own or rest.startswith(self.left_out or "\0"):
                continue
            part = next((part for part in self.parts if rest.startswith(part[0])), None)
            if part is not None:
                found[f"model.layers.{self.layer}.{part[1]}{rest.removeprefix(part[0])}"] = name
        return found

    def weights(self, vocab_size: int, hidden: int) -> int:
        """Return the number of weights around the head's layer, beside the last norm's."""
        return 2 * hidden * hidden + 2 * hidden


_LIKE_A_LAYER = MtpSpec(
    "model.layers.{}.",
    (("final_layernorm.", "shared_head.norm."), ("transformer.shared_head.norm.", "shared_head.norm."), ("", "")),
    left_out=("embed_tokens.", "shared_head.head.", "transformer.shared_head.output."),
)
"""DeepSeek V3 and R1, GLM 4.5 and its successors, Hy3, Ling and Step 3.5."""
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
_MIMO_V2 = MtpSpec(
    "model.mtp.layers.0.",
    (("final_layernorm.", "shared_head.norm."), ("pre_mlp_layernorm.", "post_attention_layernorm."), ("", "")),
    left_out=("embed_tokens.",),
    keeps_normed=True,
)
_NEMOTRON = MtpSpec(
    "mtp.layers.",
    (
        ("0.eh_proj.", "eh_proj."),
        ("0.enorm.", "enorm."),
        ("0.hnorm.", "hnorm."),
        ("1.final_layernorm.", "shared_head.norm."),
        ("0.", "0."),
        ("1.", "1."),
    ),
    keeps_normed=True,
    layers=2,
)
"""Attention, then experts."""
_ERNIE = MtpSpec(
    "model.mtp_",
    (("linear_proj.0.", "eh_proj."), ("emb_norm.0.", "enorm."), ("hidden_norm.0.", "hnorm."), ("block.0.", "")),
    has_norm=False,
)
_KINDS = (_LIKE_A_LAYER, _NEMOTRON, _QWEN, _MIMO, _MIMO_V2, _ERNIE)


def mtp_head(spec: ModelSpec, directory: Path, *, is_dummy: bool = False) -> ModelSpec | None:
    """Return the spec of the head that a model's checkpoint has; None if it has none.

    Args:
        spec: The model.
        directory: Its files.
        is_dummy: Whether weights are made up, so that config.json alone says whether there is a head.
    """
    number, shapes = len(spec.layers), read_headers(directory)
    kinds = [replace(kind, layer=number) for kind in _KINDS]
    kind = next((kind for kind in kinds if f"model.layers.{number}.eh_proj.weight" in kind.names_in(shapes)), None)
    if is_dummy and kind is None:
        like_a_layer, nemotron = (replace(each, layer=number) for each in (_LIKE_A_LAYER, _NEMOTRON))
        kind = replace(_QWEN, layer=number) if spec.architecture.startswith(("Qwen3Next", "Qwen3_5")) else None
        kind = (nemotron if spec.layers[0].norms.place == "alone" else like_a_layer) if spec.mtp_layers else kind
    if kind is None:
        return None
    names = kind.names_in(shapes)
    layers = _layers(spec, kind, {own: shapes[name] for own, name in names.items()})
    if layers is None:
        return None
    own_norm = spec.family.modules.norm if kind.has_norm else ""
    modules = replace(spec.family.modules, layer=kind.layer_name, norm=own_norm)
    return replace(
        spec,
        family=replace(spec.family, decoder="quire.models.mtp:MtpHead", modules=modules),
        layers=layers,
        head=kind,
        quantization=None if all(name.endswith(_PLAIN) for name in names.values()) else spec.quantization,
        held=None,
        groups=None,
        mtp_layers=range(0),
        vision=None,
    )


def _layers(spec: ModelSpec, kind: MtpSpec, shapes: Mapping[str, tuple[int, ...]]) -> tuple[LayerSpec, ...] | None:
    """Return the head's layers, made of parts of the model's last layers that have the shapes; None: there are none."""
    modules, latest = spec.family.modules, spec.layers[::-1]
    attending = [layer for layer in latest if isinstance(layer.mixer, AttentionSpec | LatentSpec)]
    if not attending:
        return None
    begin = kind.layer_name.format(0)
    keys = shapes.get(f"{begin}.{modules.qkv[1]}.weight") if len(modules.qkv) > 1 else None
    found = next((layer for layer in attending if keys and _key_width(layer) == keys[0]), attending[0])
    if kind.layers > 1:
        alone = [layer for layer in latest if isinstance(layer.mixer, NoMixerSpec)]
        return found, next((layer for layer in alone if isinstance(layer.mlp, MixtureSpec)), alone[0])
    with_experts = any(name.startswith(f"{begin}.{modules.experts}.") for name in shapes)
    mlps = [layer.mlp for layer in latest if isinstance(layer.mlp, MixtureSpec) == with_experts]
    return (replace(found, mlp=mlps[0] if shapes and mlps else found.mlp),)


def _key_width(layer: LayerSpec) -> int:
    return layer.mixer.kv_width if isinstance(layer.mixer, AttentionSpec) else 0
