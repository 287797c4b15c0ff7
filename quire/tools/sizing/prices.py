"""What an hour of a device costs: a file of the user's own, since prices differ and change."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from quire.errors import ConfigError, reason
from quire.planning.costmodel.cards import CARDS


def read_prices(path: str | None) -> dict[str, float]:
    """Price of an hour by the device's word for --gpu; nothing without a file.

    Raises:
        ConfigError: The file cannot be read, or has something else in it.
    """
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
