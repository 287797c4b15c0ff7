"""Reads and writes tables of the fastest kernels, by the form and shape of the weight and the rows of x.

A table is a JSON file in `configs/`, one for each GPU and form of weight, named as vLLM names its tables. The scripts
in tuning/ measure and write them. A GPU without a table uses the H200's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from quire.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
_MEASURED = "NVIDIA H200"
_SHAPE = re.compile(r"N=(\d+),K=(\d+)")

C = TypeVar("C")
Shape = tuple[int, int]
"""(outputs, columns) of a weight."""


@dataclass(frozen=True)
class TunedConfigs(Generic[C]):
    """The configs of products with weights of one form.

    Attributes:
        up_to: Numbers of rows of x, ascending: a config serves this many rows and fewer.
        plain: By shape of the weight, a config for each of `up_to`; None: none of our kernels is the fastest.
        gated: By shape, the configs of products to which a gate is applied.
    """

    up_to: tuple[int, ...]
    plain: Mapping[Shape, tuple[C | None, ...]]
    gated: Mapping[Shape, tuple[C | None, ...]]

    def config(self, outputs: int, columns: int, rows: int, gate: bool) -> C | None:
        """Return the config for `rows` of x and a weight of this shape, or of the nearest shape by the ratios of sides.

        None means that another product is faster, or that so many rows were not measured.
        """
        size = next((number for number, most in enumerate(self.up_to) if rows <= most), None)
        if size is None:
            return None

        def distance(shape: Shape) -> float:
            return abs(math.log(shape[0] / outputs)) + abs(math.log(shape[1] / columns))

        table = self.gated if gate else self.plain
        return table[min(table, key=distance)][size]


def configs_path(directory: Path, device: str, dtype: str) -> Path:
    """Return the path of the table for a device, as torch names it, and a form of weight, as vLLM's tables name it."""
    return directory / f"device_name={device.replace(' ', '_')},dtype={dtype}.json"


def read_configs(dtype: str, kernels: Mapping[str, type[C]], directory: Path = CONFIGS) -> TunedConfigs[C]:
    """Read the table for weights of this form on the current GPU, or else the H200's.

    Args:
        dtype: The form of the weights: bf16, fp8_w8a8, int8_w8a8 or int4_w4a16.
        kernels: The classes of configs, by the names that the table has for their kernels.
        directory: The directory of the tables.

    Raises:
        ConfigError: The table is broken; the message names its file.
    """
    path = configs_path(directory, torch.cuda.get_device_name() if torch.cuda.is_available() else _MEASURED, dtype)
    path = path if path.exists() else configs_path(directory, _MEASURED, dtype)
    try:
        return _table(msgspec.json.decode(path.read_bytes(), type=_Table), kernels)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no table of configs ({error}): write it again with tuning/.") from None


def write_configs(path: Path, configs: TunedConfigs[C], kernels: Mapping[str, type[C]]) -> None:
    """Write a table to `path` in the format of `read_configs`; `kernels` as there."""
    names = {kind: name for name, kind in kernels.items()}

    def entry(config: Any) -> str:
        return json.dumps(None if config is None else {"kernel": names[type(config)], **asdict(config)})

    def rows(shape: Shape, row: tuple[C | None, ...]) -> str:
        lines = (f'      "{most}": {entry(each)}' for most, each in zip(configs.up_to, row, strict=True))
        return f'    "N={shape[0]},K={shape[1]}": {{\n' + ",\n".join(lines) + "\n    }"

    tables = {"plain": configs.plain, "gated": configs.gated}
    parts = (
        f'  "{name}": {{\n' + ",\n".join(rows(*item) for item in table.items()) + "\n  }"
        for name, table in tables.items()
        if table
    )
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


_Entry = dict[str, str | bool | int] | None


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """A table's file: configs by shape of the weight and by rows of x."""

    plain: dict[str, dict[int, _Entry]]
    gated: dict[str, dict[int, _Entry]] = {}


def _table(stored: _Table, kernels: Mapping[str, type[C]]) -> TunedConfigs[C]:
    up_to = tuple(next(iter(stored.plain.values()), {}))
    if not up_to or list(up_to) != sorted(up_to):
        raise ValueError("its rows must ascend")

    def config(entry: _Entry) -> C | None:
        if entry is None:
            return None
        kind = kernels[str(entry.pop("kernel"))]
        config: C = kind(**entry)
        return msgspec.convert(asdict(config), kind)  # type: ignore[call-overload]

    def by_shape(table: dict[str, dict[int, _Entry]]) -> dict[Shape, tuple[C | None, ...]]:
        found = {}
        for name, row in table.items():
            if (shape := _SHAPE.fullmatch(name)) is None or tuple(row) != up_to:
                raise ValueError(f"{name} must be N=outputs,K=columns, with the rows {up_to}")
            found[int(shape[1]), int(shape[2])] = tuple(map(config, row.values()))
        return found

    return TunedConfigs(up_to, by_shape(stored.plain), by_shape(stored.gated))
