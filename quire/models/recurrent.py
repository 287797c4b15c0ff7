"""Builds mixers that keep a state of each sequence, under the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.compute.collectives.delta import Delta
from quire.compute.mesh import Span
from quire.models.families.family import ModuleNames
from quire.models.layer_spec import HybridSpec
from quire.models.layers.factory import LayerFactory, Outputs
from quire.models.layers.kimi_delta import DeltaGates, KimiDelta
from quire.models.layers.mamba import Mamba, Selection
from quire.models.layers.norm import RMS, RMSNorm
from quire.models.layers.recurrent import GatedDelta, Lightning, Mamba2, NoMixer, Parameters, Products, ShortConv, Sum
from quire.models.recurrent_spec import GatedDeltaSpec, KimiDeltaSpec, LightningSpec, NoMixerSpec, ShortConvSpec
from quire.models.spec import ModelSpec
from quire.models.state_space_spec import Mamba2Spec, MambaSpec
from quire.models.weights.checkpoint import WeightSpec
from quire.models.weights.shards import Cut

Recurrent = Lightning | ShortConv | Mamba | Mamba2 | GatedDelta | KimiDelta | NoMixer


def build_recurrent(spec: ModelSpec, build: LayerFactory, layer: int) -> Recurrent:
    """Build the mixer of layer number `layer`, which keeps a state of each sequence, or there is none."""
    own = spec.layers[layer].mixer
    if isinstance(own, HybridSpec):
        own = own.state_space
    name = f"{spec.layer_name(layer)}.{spec.family.modules.recurrent}"
    number = layer - build.own_layers(len(spec.layers)).start
    match own:
        case ShortConvSpec():
            return _short_conv(own, build, name, number)
        case LightningSpec():
            return _lightning(own, build, name, number)
        case MambaSpec():
            return _mamba(own, build, name, number)
        case Mamba2Spec():
            return _mamba2(own, build, name, number)
        case KimiDeltaSpec():
            return _kimi_delta(own, build, name, number, spec)
        case GatedDeltaSpec():
            return _gated_delta(own, build, name, number, spec)
        case _:
            assert isinstance(own, NoMixerSpec)
            return NoMixer()


def _short_conv(own: ShortConvSpec, build: LayerFactory, name: str, number: int) -> ShortConv:
    c, conv = own.channels, f"{name}.conv"
    specs = {"conv": WeightSpec(f"{conv}.weight", (c, 1, own.kernel))}
    if own.bias:
        specs["conv_bias"] = WeightSpec(f"{conv}.bias", (c,))
    part = _cut(build, (c, 1))
    into = build.rows_of({f"{name}.in_proj": _cut(build, (c, 1), (c, 1), (c, 1))}, own.inputs, own.bias)
    out = build.row_parallel(f"{name}.out_proj", own.outputs, c, own.bias)
    parameters = build.remember(Parameters(specs, dict.fromkeys(specs, part), build.options))
    return ShortConv(own.divided(build.ranks), Products(number, into, out), parameters, build.options.device.type)


def _lightning(own: LightningSpec, build: LayerFactory, name: str, number: int) -> Lightning:
    width, heads, part = own.head_dim, (own.heads, own.head_dim), build.part(own.heads)
    numbers = range(part.start, part.start + part.count)
    # A head's queries, keys and values lie side by side; a state space takes values, then keys, then queries.
    spans = tuple(Span((3 * head + at) * width, width) for at in (2, 1, 0) for head in numbers)
    cut = Cut(3 * own.inner, spans)
    into = build.rows_of({f"{name}.qkv_proj": cut}, own.inputs, bias=False)
    gate = build.rows_of({f"{name}.output_gate": _cut(build, heads)}, own.inputs, bias=False)
    out = build.row_parallel(f"{name}.out_proj", own.outputs, Outputs(*heads), bias=False)
    specs = {"norm": WeightSpec(f"{name}.norm.weight", (own.inner,))}
    parameters = build.remember(Parameters(specs, {"norm": _cut(build, heads)}, build.options))
    rates, summed = build.slopes(own.rates), Sum(build.collectives, own.inner) if build.ranks > 1 else None
    assert rates is not None
    divided = own.divided(build.ranks)
    return Lightning(divided, Products(number, into, out), gate, rates, parameters, build.options.device.type, summed)


def _mamba(own: MambaSpec, build: LayerFactory, name: str, number: int) -> Mamba:
    c, (rank, n, _) = own.channels, own.selected
    specs = {
        "conv": WeightSpec(f"{name}.conv1d.weight", (c, 1, own.kernel)),
        "decay": WeightSpec(f"{name}.A_log", (c, n)),
        "dt_bias": WeightSpec(f"{name}.dt_proj.bias", (c,)),
        "skip": WeightSpec(f"{name}.D", (c,)),
    }
    if own.conv_bias:
        specs["conv_bias"] = WeightSpec(f"{name}.conv1d.bias", (c,))
    part = _cut(build, (c, 1))
    into = build.rows_of({f"{name}.in_proj": _cut(build, (c, 1), (c, 1))}, own.inputs, own.bias)
    norms: tuple[RMSNorm, ...] = ()
    if own.norms != "none":
        kind = RMS(own.eps, weight=own.norms == "weights")
        widths = zip(("dt", "b", "c"), own.selected, strict=True)
        norms = tuple(build.norm(f"{name}.{each}_layernorm", width, kind) for each, width in widths)
    selection = Selection(
        build.row_parallel(f"{name}.x_proj", rank + 2 * n, Outputs(c), bias=False),
        norms,
        build.rows_of({f"{name}.dt_proj": part}, rank, bias=False),
    )
    out = build.row_parallel(f"{name}.out_proj", own.outputs, Outputs(c), own.bias)
    parameters = build.remember(Parameters(specs, dict.fromkeys(specs, part), build.options))
    products = Products(number, into, out)
    return Mamba(own.divided(build.ranks), products, selection, parameters, build.options.device.type)


def _mamba2(own: Mamba2Spec, build: LayerFactory, name: str, number: int) -> Mamba2:
    heads, groups = (own.heads, own.head_dim), (own.groups, own.state)
    specs = {
        "conv": WeightSpec(f"{name}.conv1d.weight", (own.channels, 1, own.kernel)),
        **{each: WeightSpec(f"{name}.{stored}", (own.heads,)) for each, stored in _OF_HEADS.items()},
    }
    if own.conv_bias:
        specs["conv_bias"] = WeightSpec(f"{name}.conv1d.bias", (own.channels,))
    if own.norm:
        specs["norm"] = WeightSpec(f"{name}.norm.weight", (own.inner,))
    convolved, each = _cut(build, heads, groups, groups), _cut(build, (own.heads, 1))
    cuts = {"conv": convolved, "conv_bias": convolved, "norm": _cut(build, heads), **dict.fromkeys(_OF_HEADS, each)}
    projected = _cut(build, heads, heads, groups, groups, (own.heads, 1))
    into = build.rows_of({f"{name}.in_proj": projected}, own.inputs, own.bias)
    if own.factors:
        counts = [build.part(units).count * width for units, width in (heads, heads, groups, groups, (own.heads, 1))]
        into = build.scaled(into, list(zip(counts, own.factors, strict=True)))
    out = build.row_parallel(f"{name}.out_proj", own.outputs, Outputs(*heads), own.bias)
    parameters = build.remember(Parameters(specs, cuts, build.options))
    is_divided = own.norm and own.norm_groups == 1 and build.ranks > 1
    summed = Sum(build.collectives, own.inner) if is_divided else None
    products = Products(number, into, out)
    return Mamba2(own.divided(build.ranks), products, parameters, build.options.device.type, summed)


_OF_HEADS = {"decay": "A_log", "dt_bias": "dt_bias", "skip": "D"}
"""Names of tensors with a number for each head, by what the mixer calls them."""


def _gated_delta(own: GatedDeltaSpec, build: LayerFactory, name: str, number: int, spec: ModelSpec) -> GatedDelta:
    modules = spec.family.modules
    keys, values, each = (own.keys, own.key_dim), (own.values, own.value_dim), (own.values, 1)
    shared = own.values // own.keys
    wide = own.key_dim, own.key_dim, shared * own.value_dim, shared * own.value_dim
    apart = (
        ((keys,), (keys,), (values,), (values,)) if len(modules.delta_in) == 4 else ((keys, keys, values), (values,))
    )
    into, gates = (
        build.rows_of(
            _by_head(build, f"{name}.{stored[0]}", own.keys, widths)
            if len(stored) == 1
            else {f"{name}.{one}": _cut(build, *parts) for one, parts in zip(stored, separate, strict=True)},
            own.inputs,
            bias=False,
        )
        for stored, widths, separate in (
            (modules.delta_in, wide, apart),
            (modules.delta_gates, (shared, shared), ((each,), (each,))),
        )
    )
    products = Products(number, into, _delta_out(own, build, f"{name}.{modules.delta_out}"))
    parameters = _delta_parameters(own, build, name, modules, each)
    return GatedDelta(own.divided(build.ranks), products, gates, parameters, build.options.device.type)


def _kimi_delta(own: KimiDeltaSpec, build: LayerFactory, name: str, number: int, spec: ModelSpec) -> KimiDelta:
    modules = spec.family.modules
    keys, values, latent = (own.keys, own.key_dim), (own.values, own.value_dim), own.value_dim
    parts = {f"{name}.{part}_proj": _cut(build, heads) for part, heads in (("q", keys), ("k", keys), ("v", values))}
    decays, gate, beta = _cut(build, (own.values, own.key_dim)), _cut(build, values), _cut(build, (own.values, 1))
    whole, to_decays, to_gate = Cut(latent, (Span(0, latent),)), None, None
    of_gates = {"f_proj": decays, "g_proj": gate, "b_proj": beta}
    if own.by_latents:
        of_gates = {"f_a_proj": whole, "g_a_proj": whole, "b_proj": beta}
        to_decays, to_gate = (
            build.rows_of({f"{name}.{stored}": cut}, latent, bias=False)
            for stored, cut in (("f_b_proj", decays), ("g_b_proj", gate))
        )
    product = build.rows_of({f"{name}.{stored}": cut for stored, cut in of_gates.items()}, own.inputs, bias=False)
    products = Products(
        number, build.rows_of(parts, own.inputs, bias=False), _delta_out(own, build, f"{name}.{modules.delta_out}")
    )
    parameters = _delta_parameters(own, build, name, modules, keys)
    gates = DeltaGates(product, to_decays, to_gate)
    return KimiDelta(own.divided(build.ranks), products, gates, parameters, build.options.device.type)


def _delta_out(own: GatedDeltaSpec, build: LayerFactory, name: str) -> Callable[[Tensor], Delta]:
    return build.row_parallel(name, own.outputs, Outputs(own.values, own.value_dim), bias=False)


def _delta_parameters(
    own: GatedDeltaSpec, build: LayerFactory, name: str, modules: ModuleNames, decayed: tuple[int, int]
) -> Parameters:
    """Build the small weights of a delta rule, whose biases of decays are those of `decayed`: heads, and how many a
    head has.
    """
    keys, values, count = (own.keys, own.key_dim), (own.values, own.value_dim), own.values
    specs = {
        "conv": WeightSpec(f"{name}.conv1d.weight", (own.channels, 1, own.kernel)),
        "decay": WeightSpec(f"{name}.A_log", (1, 1, count, 1), any_rank=True),
        "dt_bias": WeightSpec(f"{name}.dt_bias", (decayed[0] * decayed[1],)),
        "norm": WeightSpec(f"{name}.{modules.delta_norm}.weight", (own.value_dim,)),
    }
    cuts = {"conv": _cut(build, keys, keys, values), "decay": _cut(build, (count, 1)), "dt_bias": _cut(build, decayed)}
    return build.remember(Parameters(specs, cuts, build.options))


def _cut(build: LayerFactory, *parts: tuple[int, int]) -> Cut:
    """Return this rank's outputs of a module that has parts of so many units, each so wide, side by side."""
    spans, begin = [], 0
    for units, width in parts:
        own = build.part(units)
        spans.append(Span(begin + own.start * width, own.count * width))
        begin += units * width
    return Cut(begin, _joined(spans))


def _by_head(build: LayerFactory, name: str, heads: int, widths: tuple[int, ...]) -> dict[str, Cut]:
    """Return this rank's outputs of a module that stores parts of these widths for one head after the other: the first
    part of all heads, then the second and so on.
    """
    own, each, begin, spans = build.part(heads), sum(widths), 0, []
    for width in widths:
        spans += [Span(head * each + begin, width) for head in range(own.start, own.start + own.count)]
        begin += width
    return {name: Cut(heads * each, _joined(spans))}


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """Return the spans, with neighbours as one."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].start + joined[-1].count == span.start:
            last = joined.pop()
            joined.append(Span(last.start, last.count + span.count))
        else:
            joined.append(span)
    return tuple(joined)
