"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LoadAdapterRequest(BaseModel):
    """Which adapter is loaded, and under which name."""

    model_config = ConfigDict(strict=True)

    lora_name: str = Field(description="What requests call it as their model.")
    lora_path: str = Field(description="Directory of the server, s3://bucket/key or hub id.")
    load_inplace: bool = Field(default=False, description="Replace what has this name.")


class UnloadAdapterRequest(BaseModel):
    """Which adapter is forgotten."""

    model_config = ConfigDict(strict=True)

    lora_name: str
    lora_int_id: int | None = Field(default=None, description="Ignored: the name says which.")
