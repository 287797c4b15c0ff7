"""Torch's largest library is loaded by a thread, while the interpreter imports something else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

_TORCH = Path(importlib.util.find_spec("torch").origin or "").parent  # type: ignore[union-attr]
_ONLY_CPU = not (_TORCH / "lib" / "libtorch_cuda.so").exists()
_LOADED = """
from pathlib import Path
import sys, threading, time
{}
deadline = time.monotonic() + 60
while any(thread.name == "torch-library" for thread in threading.enumerate()) and time.monotonic() < deadline:
    time.sleep(0.01)
assert "torch" not in sys.modules
print("libtorch_cpu.so" in Path("/proc/self/maps").read_text())
"""


def _loads(statement: str) -> bool:
    """Whether the library is there after a statement and all its threads, before anything imports torch."""
    done = subprocess.run([sys.executable, "-c", _LOADED.format(statement)], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


@pytest.mark.skipif(not _ONLY_CPU, reason="this torch loads CUDA's libraries first")
def test_whoever_asks_for_llm_gets_the_library_in_the_background() -> None:
    assert _loads("from quire import LLM")


def test_the_rest_of_quire_loads_nothing() -> None:
    assert not _loads("import quire.offline.llm; from quire import SamplingParams")


@pytest.mark.skipif(not _ONLY_CPU, reason="this torch loads CUDA's libraries first")
def test_torch_imports_as_usual_beside_it() -> None:
    begin = "from quire.runtime.executor.early_loading import begin_loading; begin_loading()"
    told = f"{begin}; import torch; print(torch.ones(3).sum())"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tensor(3.)"
