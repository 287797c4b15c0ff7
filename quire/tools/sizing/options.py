"""The options of `quire plan`, and what devices cost: prices differ, so they come from a file of the user."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import tyro

from quire.errors import ConfigError, reason
from quire.foundation.config.values import check_positive
from quire.planning.costmodel.cards import CARDS


@dataclass(frozen=True)
class PlanOptions:
    """Which model, devices and load are planned for, and where the result goes."""

    DESCRIPTION: ClassVar[str] = (
        "Plan for a model before there is a machine: what fits, what it takes, what it costs. Reads config.json and "
        "the headers of weight files only."
    )

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="MODEL")] = None
    """A directory, a config.json, a GGUF file, quill, or a hub id whose config.json is in the local cache."""
    gpu: str | None = None
    """Devices, separated by commas: h200, h100, a100, l40s, l4, 4090, b200 and others; cpu is this machine's processor;
    all are all of them. Default: this machine's GPU, or its processor if it has none."""
    tensor_parallel_sizes: str = "1,2,4,8"
    """How many of a device may divide the model, separated by commas."""
    formats: str = "checkpoint,fp8,w4a16"
    """Of weights, separated by commas: checkpoint (as config.json says), fp8 (quantized at the start), w4a16 (4 bits in
    groups of 128, a checkpoint of its own). A model that is quantized already stays as it is."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of keys and values."""
    max_model_len: int | None = None
    """Most tokens of a sequence. Default: input and output together."""
    max_num_seqs: int | None = None
    """Most sequences at once. Default: the server's."""
    speculative_config: dict[str, Any] | None = None
    """Who proposes drafts, as quire serve takes it. Memory of a draft model or head, and of states for drafts, is
    counted; speeds are those without drafts."""
    gpu_memory_utilization: float = 0.9
    """Share of a device's memory that the engine takes."""
    kv_offloading_size: float | None = None
    """GiB of host memory for the prefix cache beyond the devices, of all that divide the model together."""
    input_len: int = 512
    """Tokens of a prompt."""
    output_len: int = 128
    """Tokens of an output."""
    trace: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A load instead of --input-len and --output-len, in a format of docs/planning.md. What is recommended is then
    simulated with it."""
    rate: float | None = None
    """Requests a second that are to be served. Default: the trace's."""
    target_ttft: Annotated[float | None, tyro.conf.arg(metavar="MS")] = None
    """Most milliseconds to the first token."""
    target_tpot: Annotated[float | None, tyro.conf.arg(metavar="MS")] = None
    """Most milliseconds a token after it."""
    prices: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """What an hour of a device costs, by its word for --gpu, as JSON or YAML: h200: 3.50."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the plan to this file."""
    picture: Annotated[str | None, tyro.conf.arg(metavar="FILE.svg")] = None
    """Draw what the recommended device reaches by how many sequences it serves at a time."""
    check: bool = False
    """Instead of a plan, print predictions beside the measured rows of docs/performance.md. Needs no MODEL."""

    def __post_init__(self) -> None:
        lengths = ("input_len", "output_len", "max_model_len", "max_num_seqs")
        check_positive(self, *lengths, "kv_offloading_size", "rate", "target_ttft", "target_tpot")
        if self.model is None and not self.check:
            raise ConfigError("Name a model: quire plan MODEL. 'quire plan --help' lists the flags.", param="model")


def read_prices(path: str | None) -> dict[str, float]:
    """Price of an hour, by the device's word for --gpu; empty without a file. Raises ConfigError for a wrong file."""
    if path is None:
        return {}
    try:
        found = msgspec.yaml.decode(Path(path).read_bytes())  # JSON is YAML
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--prices {path} cannot be read: {reason(error)}.", param="prices") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--prices {path} must have a price by device, as h200: 3.50.", param="prices")
    for name, price in found.items():
        if name not in CARDS and name != "cpu":
            raise ConfigError(f"--prices {path}: '{name}' is not one of {', '.join(CARDS)}, cpu.", param="prices")
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
            raise ConfigError(f"--prices {path}: {name} must have a price above 0, not {price!r}.", param="prices")
    return {name: float(price) for name, price in found.items()}
