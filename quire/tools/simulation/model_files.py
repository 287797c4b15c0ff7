"""The model that a plan or a simulation is for: found here, never downloaded."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelNotFoundError
from quire.foundation.config import BUILTIN_MODEL
from quire.models.weights import hub


def find_model(name: str) -> Path:
    """The directory with the model's config.json.

    Raises:
        ModelNotFoundError: There is none here; the message says what to do.
        CheckpointError: A GGUF file is broken or not served.
    """
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent
    if path.exists() or name == BUILTIN_MODEL:
        return hub.resolve(name)
    from huggingface_hub import try_to_load_from_cache  # takes 0.3 s
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise ModelNotFoundError(
            f"'{name}' is neither here nor in the hub's local cache. Only its config.json is needed: give its path, "
            f"or fetch it with `hf download {name} config.json`."
        )
    return Path(found).parent
