"""Reads layers with experts from config.json: which layers have any, their router, and their shared expert.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.compute.kernels.activations import SILU, Activation
from quire.compute.kernels.routing import Routing
from quire.models.config_file import ConfigFile
from quire.models.families.family import ReadLayer
from quire.models.layer_spec import LayerSpec, MixtureSpec, MlpSpec, SharedExpert

SIGMOID: dict[str, Any] = {
    "scoring": "sigmoid", "correction": True, "of_best_two": True, "epsilon": 1e-20, "fp32": "sums"
}  # fmt: skip
"""The routing of DeepSeek-V3."""

_ACTIVATIONS = {("silu", True): SILU, ("relu2", False): Activation("relu2")}
"""What experts compute, by the activation of the MLP in whose place they are, and by whether it has a gate."""


def experts_in_place_of_mlps(*, gated: bool = False, factor: float = 1.0, **routing: Any) -> ReadLayer:
    """Return a reader that gives layers experts in place of their MLP, where config.json says so.

    Args:
        gated: Whether the shared expert has a gate.
        factor: Factor of the sum of experts and the shared expert.
        routing: Properties of `Routing` that the architecture fixes; config.json decides the rest.
    """

    def read(fields: ConfigFile, layer: LayerSpec, number: int) -> LayerSpec:
        assert isinstance(layer.mlp, MlpSpec)
        if not has_experts(fields, number):
            return layer
        if (layer.mlp.activation, layer.mlp.gated) not in _ACTIVATIONS:
            raise fields.wrong("hidden_act", "is not supported: experts have silu")
        mixture = read_mixture(fields, layer.mlp, routing)
        width = _shared_width(fields, mixture)
        if width:
            mlp = replace(layer.mlp, width=width)
            mixture = replace(mixture, shared=SharedExpert(mlp, gated, factor))
        return replace(layer, mlp=mixture)

    return read


def read_mixture(fields: ConfigFile, mlp: MlpSpec, fixed: dict[str, Any]) -> MixtureSpec:
    """Return the experts in place of `mlp`, with the properties of the routing that are `fixed`.

    Raises:
        CheckpointError: A number contradicts another one; the message names the key.
    """
    key = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    count, chosen = fields.count_of_all(key), fields.count_of_all("num_experts_per_tok")
    groups, kept = fields.count("n_group", 1), fields.count("topk_group", 1)
    routing = Routing(
        chosen=chosen,
        renormalise="renormalise" not in fixed and fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=kept,
    )
    if count % groups:
        raise fields.wrong("n_group", f"must divide {key} ({count})")
    if kept > groups:
        raise fields.wrong("topk_group", f"must be at most n_group ({groups})")
    if chosen > count // groups * kept:
        limit = f"{count}" if groups == kept else f"{count}, of which {count // groups * kept} are in the best groups"
        raise fields.wrong("num_experts_per_tok", f"must be at most {key} ({limit})")
    width = fields.count_of_all("moe_intermediate_size", mlp.width)
    activation = _ACTIVATIONS.get((mlp.activation, mlp.gated), SILU)
    return MixtureSpec(mlp.hidden, width, count, replace(routing, **fixed), activation=activation)


def _shared_width(fields: ConfigFile, mixture: MixtureSpec) -> int:
    """Return the width of the shared expert, which may be stored as several beside one another; 0: there is none."""
    width = fields.natural("shared_expert_intermediate_size", 0)
    return width or mixture.width * fields.natural("num_shared_experts", 0)


def has_experts(fields: ConfigFile, number: int) -> bool:
    """Return whether layer `number` has experts."""
    layers, step = fields.count("num_hidden_layers"), fields.natural("decoder_sparse_step", 1)
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and len(kinds) == layers and set(kinds) <= {"dense", "sparse"}
        if not known:
            raise fields.wrong("mlp_layer_types", f"is not supported: served are {layers} entries of dense, sparse")
        return bool(kinds[number] == "sparse")
    if fields.get("moe_layers") is not None:
        return number in fields.layer_numbers("moe_layers", layers)
    last = fields.get("moe_layer_end_index", -1)
    if isinstance(last, int) and 0 <= last < number:
        return False
    if number < fields.natural("first_k_dense_replace", 0) or number in fields.layer_numbers("mlp_only_layers", layers):
        return False
    return step > 0 and (number + 1) % step == 0
