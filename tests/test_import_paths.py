"""The module paths of vLLM that guides and scripts name lead to the same commands and classes."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import quire
from quire.import_paths import NAMES


@pytest.mark.parametrize(
    ("module", "program"),
    [
        ("quire.entrypoints.openai.api_server", "quire serve"),
        ("quire.entrypoints.openai.run_batch", "quire run-batch"),
        ("quire.benchmark_throughput", "quire bench throughput"),
        ("quire.benchmark_latency", "quire bench latency"),
    ],
)
def test_a_module_is_its_command(module: str, program: str) -> None:
    command = [sys.executable, "-m", module, "--max-modl-len", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr == f"quire: error: --max-modl-len is not a flag of {program}. Did you mean --max-model-len?\n"


_REAL = {
    "quire.outputs": ("CompletionOutput", "RequestOutput"),
    "quire.sampling_params": (
        "BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "names"), sorted((NAMES | _REAL).items()))
def test_a_script_of_vllm_finds_its_classes(module: str, names: tuple[str, ...]) -> None:
    imported = importlib.import_module(module)
    assert all(getattr(imported, name) is getattr(quire, name) for name in names)
    assert set(names) <= set(dir(imported))


@pytest.mark.parametrize("manner", ["import {module}", "from {module} import {names}", "run_module('{module}')"])
def test_every_manner_of_importing_serves(manner: str) -> None:
    """In a process of its own, where nothing of the table has been imported yet; `run_module` is `python -m`."""
    lines = [manner.format(module=path, names=", ".join(names)) for path, names in sorted(NAMES.items()) if names]
    command = [sys.executable, "-c", "\n".join(["from runpy import run_module", *lines])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_come_before_the_table() -> None:
    assert importlib.import_module("quire.engine.core").__file__
    with pytest.raises(ModuleNotFoundError, match=r"quire\.engine\.no_such"):
        importlib.import_module("quire.engine.no_such")
