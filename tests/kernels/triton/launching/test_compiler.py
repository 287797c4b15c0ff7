"""A kernel that another process compiled is found on disk, under the key that this one asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.kernels.triton.not_interpreted import printed_by


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = str(tmp_path_factory.mktemp("cache"))
    result: dict[str, Any] = json.loads(
        printed_by("tests.kernels.triton.launching.compiling_elsewhere", TRITON_CACHE_DIR=cache)
    )
    return result


def test_nothing_is_left_to_compile_here(found: dict[str, Any]) -> None:
    names = [name for name, *_ in found["start"]]
    assert sorted(names) == ["_embed", "_prefill_attention_dense", "_report_logprobs", "_scan_groups"]
    assert found["start"] == [[name, True, "compile now"] for name in names]


def test_what_has_time_comes_from_there_too_before_they_leave(found: dict[str, Any]) -> None:
    assert found["later"] == [["_embed", True, "compile later"]]


def test_threads_compile_where_processes_die(found: dict[str, Any]) -> None:
    assert found["killed"] == [["_embed", False, "compile now"]]


def test_modules_of_kernels_need_no_torch() -> None:
    """Only what launches them computes with it. A process that compiles them is ready before torch is imported."""
    program = (
        "import sys; from quire.compute.kernels.triton.launching import compiler; compiler._prepare()\n"
        "from quire.compute.kernels.triton.linear import gemv, linear\n"
        "assert 'numpy' not in sys.modules and not hasattr(sys.modules['torch'], '__version__')\n"
        "assert type(gemv._gemv_kernel).__name__ in ('JITFunction', 'Kernel'), gemv._gemv_kernel"
    )
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
