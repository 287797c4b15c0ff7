"""What a model's encoder of sounds takes of the memory, and with which settings it is served."""

from __future__ import annotations

from quire.compute.mesh import Mesh
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.models.spec import DTYPE_BYTES, ModelSpec
from quire.planning.footprint import format_bytes


def check_speech(config: Config, spec: ModelSpec, mesh: Mesh) -> None:
    """Refuse settings that a model with an encoder of sounds cannot be served with.

    Raises:
        ConfigError: The message names the setting and what to do.
    """
    if spec.speech is None:
        return
    refused = {
        "device": config.device.device != "cpu" and "it runs on a CPU alone so far: give --device cpu.",
        "tensor_parallel_size": mesh.size > 1 and "it is not divided over ranks: leave the parallel sizes out.",
        "speculative_config": config.speculation.speculation is not None and "it has no drafts: leave it out.",
        "enable_lora": config.lora.enable_lora and "its adapters are not served: leave --enable-lora out.",
    }
    for param, why in refused.items():
        if why:
            raise ConfigError(f"{spec.architecture} hears by an encoder, and {why}", param=param)


def encoder_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of the encoder's weights, and of what it computes at once; 0: there is none."""
    speech = spec.speech
    if speech is None:
        return 0
    return (speech.num_parameters + speech.activations) * DTYPE_BYTES[config.model.dtype]


def sources_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of the keys and values of the encoder's states, for all slots and the dummy; 0: there are
    none."""
    return ((config.scheduler.max_num_seqs or 0) + 1) * spec.source_bytes(config.model.dtype)


def speech_lines(config: Config, spec: ModelSpec) -> list[str]:
    """Return the line of the report about what is heard; none for models that cannot hear."""
    speech = spec.speech
    if speech is None:
        return []
    seconds = speech.samples / speech.mel.rate
    size = format_bytes(spec.source_bytes(config.model.dtype))
    states = f"{speech.length:,} states, whose keys and values take {size} a sequence"
    return [f"speech      {seconds:g} s at a time, as {states}"]
