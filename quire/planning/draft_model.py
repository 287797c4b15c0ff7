"""The draft model that the settings name: where it is, whether it fits the model, and what it takes of memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quire import builtin
from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.foundation.config import Config, SpeculationConfig
from quire.foundation.config.speculation import Speculation
from quire.models.head_spec import HeadSpec
from quire.models.mtp_spec import mtp_head
from quire.models.rank_spec import check_tensor_parallel_size, rank_share
from quire.models.spec import DTYPE_BYTES, ModelSpec, read_spec
from quire.models.weights import hub
from quire.planning.footprint import gpu_activation_bytes
from quire.planning.step_limits import StepLimits

DRAFT_TOKENS_A_STEP = 256
"""Maximum number of tokens, of all sequences together, by which the draft model catches up in a step. Sequences that
are still behind then have no drafts in it."""


def with_draft_model(config: Config, spec: ModelSpec, directory: Path) -> Config:
    """Return the settings with the draft model's directory in place of its name.

    The draft model has to suit `spec`, the model that verifies, whose files are in `directory`. Raises
    ModelNotFoundError or CheckpointError if there is no such model or its config cannot be read, and ConfigError if its
    tokens are others or it cannot follow the model.
    """
    speculation = config.speculation.speculation
    if speculation is not None and speculation.method == "mtp":
        return _with_mtp(config, speculation, spec, directory)
    if speculation is None or not speculation.model:
        return config
    name = speculation.model
    found = builtin.path(name) if name in (*builtin.MODELS, *builtin.HEADS) else _download(config, name)
    draft = read_spec(str(found))
    if speculation.method == "eagle3":
        _check_head(name, draft, spec)
    elif draft.head is not None:
        raise _error(f'{name} is a head of EAGLE-3, no model: give it with "method": "eagle3".')
    if draft.fallback is not None:
        raise _error(
            f"The draft model {name} would be computed by transformers' modules, which draft nothing: give another."
        )
    if draft.vocab_size != spec.vocab_size or not _same_tokens(found, directory):
        raise _error(f"The draft model {name} has other tokens than the model: give one with the same tokenizer.")
    if draft.state_layers:
        raise _error(f"The draft model {name} has recurrent layers, which draft nothing yet: give another.")
    if draft.rope_length_mode is not None or any(group.reach.length is not None for group in draft.kv_groups()):
        raise _error(f"The draft model {name} has sliding windows or a RoPE by length, which is not supported yet.")
    _check_ranks(config, name, draft)
    return _with_model(config, speculation, found)


def _check_ranks(config: Config, name: str, draft: ModelSpec) -> None:
    """Refuse a draft model or head that the ranks which divide the model cannot divide."""
    ranks = config.parallel.tensor_parallel_size
    try:
        check_tensor_parallel_size(draft, ranks, whole_experts=config.parallel.enable_expert_parallel)
    except ConfigError as error:
        raise _error(f"{name}, which drafts, is divided like the model: {error}") from None


def _with_model(config: Config, speculation: Speculation, found: Path) -> Config:
    own = {"method": speculation.method, "model": str(found), "num_speculative_tokens": speculation.tokens}
    return replace(config, speculation=SpeculationConfig({**(config.speculation.speculative_config or {}), **own}))


def _with_mtp(config: Config, speculation: Speculation, spec: ModelSpec, directory: Path) -> Config:
    """Return the settings with the model's own directory as the head's."""
    name = config.model.model
    if speculation.model and speculation.model not in (name, str(directory)):
        raise _error('"method": "mtp" drafts with the head in the model\'s own checkpoint: leave "model" out.')
    head = mtp_head(spec, directory, is_dummy=config.load.load_format == "dummy")
    if head is None:
        raise _error(f'{name} has no MTP head that Quire knows: give "method": "ngram", or a draft model or a head.')
    if head.attention.reach.length is not None or head.rope_length_mode is not None:
        raise _error(f"The MTP head of {name} has a sliding window or a RoPE by length, which is not supported yet.")
    _check_ranks(config, f"The MTP head of {name}", head)
    return _with_model(config, speculation, directory)


def drafter_spec(config: Config) -> ModelSpec | None:
    """Return the spec of the draft model or head that resolved settings name; None if nothing is computed for drafts.

    Raises:
        CheckpointError: From reading its config.
    """
    speculation = config.speculation.speculation
    if speculation is None or not speculation.model:
        return None
    if speculation.method != "mtp":
        return read_spec(speculation.model)
    spec, is_dummy = read_spec(speculation.model, config.model.quantization), config.load.load_format == "dummy"
    return mtp_head(spec, Path(speculation.model), is_dummy=is_dummy)


def _check_head(name: str, draft: ModelSpec, spec: ModelSpec) -> None:
    head = draft.head
    if not isinstance(head, HeadSpec):
        raise _error(
            f'{name} is no head of EAGLE-3, but {draft.architecture}: give a head, or "method": "draft_model" for a '
            "smaller model."
        )
    if head.target_hidden != spec.hidden:
        raise _error(
            f"The head {name} is for a model whose hidden_size is {head.target_hidden}, not {spec.hidden}: give one "
            "that was trained for this model."
        )
    if not head.own_embedding and draft.hidden != spec.hidden:
        raise _error(f"The head {name} is {draft.hidden} wide, and has no embeddings of its own: it does not serve.")
    layers = len(spec.layers)
    if not head.fits(layers):
        sources = ", ".join(map(str, head.sources_of(layers)))
        raise _error(f"The head {name} reads layers {sources} of a model that has {layers}: give another head.")


class DraftBytes(NamedTuple):
    """Bytes that a draft model takes of a rank: of weights, of a KV block beside the model's own, with a head's states,
    and of its largest step on a GPU. On a CPU the buffers of the model's steps serve it too."""

    weights: int = 0
    block: int = 0
    activations: int = 0


def draft_bytes(config: Config) -> DraftBytes:
    """Bytes of the draft model that resolved settings name; 0 without one."""
    draft, dtype, size = drafter_spec(config), config.model.dtype, config.cache.block_size
    if draft is None:
        return DraftBytes()
    draft = rank_share(draft, Mesh(0, config.parallel.tensor_parallel_size))
    states = 0 if draft.head is None else size * draft.hidden * DTYPE_BYTES[dtype]
    activations = 0
    if config.device.device == "cuda":
        limits = StepLimits.of(config)
        steps = StepLimits(limits.rows, max(DRAFT_TOKENS_A_STEP, limits.rows), limits.length)
        activations = gpu_activation_bytes(draft, dtype, size, steps)
    return DraftBytes(draft.weight_bytes(dtype), draft.kv_block_bytes(dtype, size) + states, activations)


def _download(config: Config, name: str) -> Path:
    access = config.model.hf_token, config.load.download_dir
    return hub.resolve(name, None, *access, asked="--speculative-config")


def _same_tokens(first: Path, second: Path) -> bool:
    """Whether both have the same ids for the same texts, as far as tokenizer.json says so."""
    files = [directory / "tokenizer.json" for directory in (first, second)]
    if not all(file.is_file() for file in files):
        return True
    texts = [file.read_bytes() for file in files]
    return texts[0] == texts[1] or _tokens(texts[0]) == _tokens(texts[1])


def _tokens(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    added = {token["content"]: token["id"] for token in found.get("added_tokens", ())}
    vocabulary = found.get("model", {}).get("vocab", {})
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else {"vocab": vocabulary, **added}


def _error(text: str) -> ConfigError:
    return ConfigError(text, param="speculative_config")
