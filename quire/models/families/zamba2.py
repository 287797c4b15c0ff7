"""Zamba2: selective state spaces, before some of which stand blocks of attention and an MLP that they share."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.families.hybrids import check_groups, layer_kinds
from quire.models.layer_spec import AttentionSpec, HybridSpec, LayerSpec, MlpSpec, SharedBlockSpec
from quire.models.state_space_spec import Mamba2Spec

_MAMBA, _HYBRID = "linear_attention", "hybrid"
_USUAL = [_HYBRID if number in (*range(6, 43, 6), 47, 51) else _MAMBA for number in range(54)]
"""The kinds of layers of a file that does not name them."""


def _state_space(fields: ConfigFile, hidden: int) -> Mamba2Spec:
    heads, groups = fields.count("n_mamba_heads"), fields.count("mamba_ngroups")
    inner = fields.count("mamba_expand") * hidden
    mixer = Mamba2Spec(
        hidden,
        hidden,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state=fields.count("mamba_d_state"),
        kernel=fields.count("mamba_d_conv"),
        bias=fields.flag("add_bias_linear"),
        norm_groups=groups,
        dt_bounds=(fields.number("time_step_min", 0.001), float("inf")),
    )
    if mixer.inner != inner:
        raise fields.wrong("n_mamba_heads", f"must divide the width of all heads ({inner})")
    check_groups(fields, mixer, "mamba_ngroups")
    return mixer


def _layer(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
    kinds = layer_kinds(fields, (_MAMBA, _HYBRID), _USUAL, "layers_block_type")
    own, mlp, norms = layer.mixer, layer.mlp, replace(layer.norms, number=1, place="alone")
    assert isinstance(own, AttentionSpec) and isinstance(mlp, MlpSpec)
    beside = _state_space(fields, own.outputs)
    if kinds[number] == _MAMBA:
        return LayerSpec(beside, MlpSpec(own.outputs, 0), norms)
    hybrids = [at for at, kind in enumerate(kinds) if kind == _HYBRID]
    use, blocks = hybrids.index(number), fields.count("num_mem_blocks")
    width = 2 * own.outputs // own.heads
    same = {each.name: getattr(own, each.name) for each in fields_of(own)} | {
        "inputs": 2 * own.outputs,
        "head_dim": width,
        "scale": (width / 2) ** -0.5,
        "rope": own.rope if fields.flag("use_mem_rope") else None,
    }
    bias = fields.flag("add_bias_linear")
    shared = SharedBlockSpec(
        hybrids[use % blocks],
        use,
        fields.count("adapter_rank"),
        fields.flag("use_shared_attention_adapter"),
        stores=use < blocks,
    )
    return LayerSpec(HybridSpec(**same, beside=beside), replace(mlp, bias=bias), norms, shared=shared)


FAMILIES: dict[str, Family] = {
    "Zamba2ForCausalLM": Family(
        decoder="quire.models.zamba2:Zamba2",
        windows="chunks",
        modules=ModuleNames(
            norm="model.final_layernorm",
            norms=("input_layernorm",),
            recurrent="mamba",
            up=("feed_forward.gate_up_proj",),
            down="feed_forward.down_proj",
        ),
        defaults={
            "hidden_act": "gelu",
            "intermediate_size": 10240,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
        },
        only={"use_long_context": (False,)},
        activations=("gelu",),
        read_layer=_layer,
    ),
}
