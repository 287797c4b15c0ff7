"""What launches kernels of different signatures stays apart, however many threads load it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton.runtime import build

from quire.compute.kernels.triton.launching.precompiler import Precompiler
from quire.compute.kernels.triton.launching.triton_private import load_launchers_apart

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_NOARGS, NULL}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_launcher(void) {{ return PyModule_Create(&module); }}
"""
"""Like Triton 3.6's of a signature: one name for all, and no state of a module's own."""


@pytest.fixture
def quick_turns() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="compiles C")
@pytest.mark.usefixtures("quick_turns")
def test_each_thread_has_what_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython gives all modules of a name that were loaded before one object, whose contents are the last one's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    Precompiler(1).close()
    sources = [SOURCE.format(number=number) for number in range(4)]

    def launcher(number: int) -> int:
        found: int = build.compile_module_from_src(sources[number], "launcher").launch()
        return found

    asked = [number % len(sources) for number in range(800)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(launcher, asked)) == asked


def test_once_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_load_module_from_path", lambda name, path: None)
    load_launchers_apart()
    once = build._load_module_from_path
    load_launchers_apart()
    assert build._load_module_from_path is once


def test_a_triton_that_loads_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "_load_module_from_path")
    load_launchers_apart()
    assert not hasattr(build, "_load_module_from_path")
