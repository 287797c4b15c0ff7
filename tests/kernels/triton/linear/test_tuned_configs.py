"""Tables of configs are what was written, are checked when they are read, and are the GPU's own where it has any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.compute.kernels.triton.linear import grouped, linear
from quire.compute.kernels.triton.linear.gemm import GemmConfig
from quire.compute.kernels.triton.linear.gemv import GemvConfig
from quire.compute.kernels.triton.linear.tuned_configs import (
    CONFIGS,
    TunedConfigs,
    configs_path,
    read_configs,
    write_configs,
)
from quire.errors import ConfigError

H200 = "NVIDIA H200"
TABLE: TunedConfigs[GemvConfig | GemmConfig] = TunedConfigs(
    (1, 16, 64),
    {(64, 32): (GemvConfig(2, 32, 1), GemmConfig(16, 32, 32, 2, 4, 3, True), None)},
    {(4096, 32): (GemvConfig(4, 32, 1), GemmConfig(16, 64, 32, 1, 4, 3, False), None), (64, 64): (None, None, None)},
)
STORED = """{"plain": {
    "N=64,K=32": {"1": {"kernel": "gemv", "block_n": 2, "block_k": 32, "warps": 1}, "4": null},
    "N=64,K=64": {"1": null, "4": null}
}}"""


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_configs(configs_path(tmp_path, H200, "bf16"), TABLE, linear.KERNELS)
    found = read_configs("bf16", linear.KERNELS, tmp_path)
    assert found == TABLE
    assert found.config(64, 32, 2, gate=False) == GemmConfig(16, 32, 32, 2, 4, 3, True)
    assert found.config(3000, 40, 1, gate=True) == GemvConfig(4, 32, 1)
    assert found.config(64, 32, 65, gate=False) is None


def test_a_gpu_has_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_configs(configs_path(tmp_path, H200, "bf16"), TABLE, linear.KERNELS)
    own = TunedConfigs((1,), {(64, 32): (GemvConfig(8, 32, 1),)}, {})
    write_configs(configs_path(tmp_path, "NVIDIA H100 PCIe", "bf16"), own, linear.KERNELS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, expected in (("NVIDIA H100 PCIe", own), ("NVIDIA GH200", TABLE)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert read_configs("bf16", linear.KERNELS, tmp_path) == expected


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("}}", ""),
        ('"plain": {', '"other": {'),
        ("N=64,K=32", "64x32"),
        ('"1": {', '"8": {'),
        ('"1": {', '"": {'),
        ("gemv", "gems"),
        (', "warps": 1', ""),
        ('"warps": 1', '"warps": 1, "stages": 3'),
        ('"warps": 1', '"warps": "1"'),
        ('"N=64,K=64": {"1": null, "4": null}', '"N=64,K=64": {"1": null}'),
    ],
)
def test_a_broken_table_is_refused_by_name(good: str, bad: str, tmp_path: Path) -> None:
    path = configs_path(tmp_path, H200, "bf16")
    path.write_text(STORED)
    assert read_configs("bf16", linear.KERNELS, tmp_path).up_to == (1, 4)
    path.write_text(STORED.replace(good, bad, 1))
    with pytest.raises(ConfigError, match=path.name):
        read_configs("bf16", linear.KERNELS, tmp_path)


def test_every_table_that_is_shipped_can_be_read() -> None:
    forms = {path.stem.rpartition("dtype=")[2] for path in CONFIGS.iterdir()}
    assert {"bf16", "fp8_w8a8", "int8_w8a8", "int4_w4a16"} == forms
    for path in CONFIGS.glob("*.json"):
        device, dtype = path.stem.removeprefix("device_name=").split(",dtype=")
        kernels = grouped.KERNELS if dtype == "int4_w4a16" else linear.KERNELS
        assert configs_path(CONFIGS, device, dtype) == path
        assert read_configs(dtype, kernels).plain  # type: ignore[arg-type]
