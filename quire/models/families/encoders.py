"""What encoders have in common: two-sided attention, embeddings of types, and heads for labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.models.config_file import ConfigFile
from quire.models.families.family import Family, ModuleNames
from quire.models.text_head_spec import HeadPooling, HeadStep, TextHead, with_label_head

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

ReadModel = Callable[[ConfigFile, "ModelSpec"], "ModelSpec"]
ENCODER = "quire.models.encoder:Encoder"
PLAIN = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "quick_gelu")
"""Activations of MLPs without a gate."""
CLASSIFIER = HeadStep("classifier", 0)
"""A product that makes values of labels."""
POST_NORM: dict[str, Any] = {"kind": "layer", "bias": True, "number": 2, "place": "on sums"}
"""The norms of BERT's layers."""
ONLY: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}
"""Values of keys of encoders with learned positions."""


def embeddings(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec of an encoder with `type_vocab_size` token types and a norm of embeddings."""
    types = fields.natural("type_vocab_size", 0)
    return replace(spec, token_types=types, embedding_norm=True)


def no_change(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec."""
    return spec


def label_head(steps: Callable[[ConfigFile, ModelSpec], tuple[HeadStep, ...]], pooling: HeadPooling) -> ReadModel:
    """Return a reader of a head with these steps before the classifier."""

    def read(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
        return with_label_head(fields, spec, steps(fields, spec), CLASSIFIER, pooling)

    return read


def no_steps(fields: ConfigFile, spec: ModelSpec) -> tuple[HeadStep, ...]:
    """Return no steps: the classifier reads states."""
    return ()


def dense(name: str, activation: str) -> Callable[[ConfigFile, ModelSpec], tuple[HeadStep, ...]]:
    """Return a reader of one step, as wide as the stream."""
    return lambda fields, spec: (HeadStep(name, spec.hidden, activation=activation),)


def masked_head(transform: str, norm: str, bias: str) -> Callable[[ConfigFile, ModelSpec], ModelSpec]:
    """Return a reader of a head for masked tokens, which multiplies with the embedding.

    Args:
        transform, norm: The names of the product and the norm before it.
        bias: The name of the bias of logits, without `.bias`.
    """

    def read(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
        activation = str(fields.get("hidden_act", "gelu"))
        width = spec.embedding_width or spec.hidden
        steps = (HeadStep(transform, width, activation=activation, norm=norm), HeadStep(bias, spec.vocab_size))
        return replace(spec, text_head=TextHead(steps, "all"))

    return read


def chain(*readers: ReadModel) -> ReadModel:
    """Return a reader that changes a spec by each of these, one after the other."""

    def read(fields: ConfigFile, spec: ModelSpec) -> ModelSpec:
        for reader in readers:
            spec = reader(fields, spec)
        return spec

    return read


def with_heads(
    prefix: str,
    family: Mapping[str, Any],
    read_model: ReadModel,
    unread: tuple[str, ...],
    sequence: ReadModel | None,
    token: ReadModel | None = None,
    masked: ReadModel | None = None,
    sequence_unread: tuple[str, ...] = (),
) -> dict[str, Family]:
    """Return an encoder's families: the bare model and models with heads.

    Args:
        prefix: What the architectures' names begin with.
        family: The properties of all.
        read_model: Reads the bare model.
        unread: Beginnings of names of modules that the bare model leaves out.
        sequence, token, masked: Read the head for labels of texts, of tokens, and for masked tokens; None: no such
            architecture is served.
        sequence_unread: Beginnings of names that the model for labels of texts leaves out.
    """
    modules: ModuleNames = family["modules"]
    found = {f"{prefix}Model": Family(**{**family, "modules": replace(modules, unread=unread)}, read_model=read_model)}
    heads = (
        ("ForSequenceClassification", sequence, sequence_unread),
        ("ForTokenClassification", token or label_head(no_steps, "all"), ()),
        ("ForMaskedLM", masked, ()),
    )
    for name, head, left_out in heads:
        if head is not None:
            own = {**family, "modules": replace(modules, unread=left_out)}
            found[f"{prefix}{name}"] = Family(**own, read_model=chain(read_model, head))
    return found
