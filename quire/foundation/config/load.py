"""How weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LoadConfig:
    """Reading the weights."""

    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """auto and safetensors: the checkpoint's safetensors files. dummy: random weights, for measuring."""
    download_dir: str | None = None
    """Where hub downloads are kept. Default: huggingface_hub's own cache."""
    use_tqdm_on_load: bool = True
    """Show a progress bar while weights are read."""
