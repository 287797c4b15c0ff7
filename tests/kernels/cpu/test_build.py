"""Compiling the kernels: once for all processes, and if it cannot be done, torch computes and one line says why."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import platform
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.compute.kernels.cpu import build as building
from quire.compute.kernels.cpu import library as library_module
from quire.compute.kernels.cpu.build import (
    FLAGS,
    INSTRUCTION_SETS,
    BuildError,
    Processor,
    build,
    read_processor,
    this_processor,
    usable_instruction_sets,
)
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.cpu.linear import linear, pack_linear
from quire.errors import ConfigError
from quire.foundation.config import environment

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SANITIZED = ("linear", "norm", "attention", "sample", "step_inputs", "lora")
"""Kernels whose tests run under sanitizers."""
COMPILING = "Compiling the CPU kernels"
BUILD = """\
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from quire.compute.kernels.cpu import build
build.SOURCES, build.STANDARD_HEADERS = Path(sys.argv[1]), ("cstdint",)
print(build.build([sys.argv[2]], Path(sys.argv[3]), build.this_processor(), "avx2", build.FLAGS))
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    library.cache_clear()
    yield
    library.cache_clear()


X86 = [
    "processor\t: 0\n",
    "vendor_id\t: Birds\n",
    "model name\t: Swift 3\n",
    "flags\t\t: fpu avx2 fma\n",
    "power management:\n",
    "\n",
]
ARM = ["processor\t: 0\n", "BogoMIPS\t: 50.00\n", "Features\t: fp asimd bf16\n", "CPU part\t: 0xd4f\n", "\n"]


@pytest.mark.parametrize(
    ("first", "model", "features", "vendor"),
    [(X86, "Swift 3", {"fpu", "avx2", "fma"}, "Birds"), (ARM, platform.machine(), {"fp", "asimd", "bf16"}, "")],
)
def test_a_processor_is_known_by_its_first_core(first: list[str], model: str, features: set[str], vendor: str) -> None:
    lines = iter([*first, "processor\t: 1\n", "model name\t: Slow 1\n", "flags\t\t: fpu\n", "Features\t: fp\n", "\n"])
    assert read_processor(lines) == Processor(model, frozenset(features), vendor)
    assert next(lines) == "processor\t: 1\n", "more was read than is needed"


def test_this_processor_is_found_on_linux() -> None:
    whole = Path("/proc/cpuinfo").read_text()
    assert this_processor().features
    assert all(feature in whole for feature in this_processor().features)


@pytest.fixture
def compiler() -> str:
    if not (found := building.installed_compilers(environment.native_kernels().compilers)):
        pytest.skip("there is no compiler")
    return found[0][0]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two that are compiled at once, with few headers; how the kernels' own are compiled is no different."""
    if "avx2" not in this_processor().features:
        pytest.skip("not an x86")
    directory = tmp_path / "native"
    directory.mkdir()
    for name in ("one", "two"):
        (directory / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 1; }}')
    monkeypatch.setattr(building, "SOURCES", directory)
    monkeypatch.setattr(building, "STANDARD_HEADERS", ("cstdint",))
    return directory


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_instruction_sets_within_what_is_allowed() -> None:
    zen4 = Processor("", INSTRUCTION_SETS["avx512_bf16"] | {"avx2", "f16c"})
    haswell = Processor("", frozenset({"avx2", "fma", "f16c"}))
    assert usable_instruction_sets(zen4, None) == ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]
    assert usable_instruction_sets(zen4, "avx512") == ["avx512", "avx2"]
    intel = replace(zen4, vendor="GenuineIntel")
    assert usable_instruction_sets(intel, None) == ["avx512_vnni", "avx512", "avx2"]
    assert usable_instruction_sets(intel, "avx512_bf16") == usable_instruction_sets(zen4, None)
    assert usable_instruction_sets(haswell, None) == usable_instruction_sets(haswell, "avx512") == ["avx2"]
    with pytest.raises(BuildError, match="AVX2"):
        usable_instruction_sets(Processor("aarch64", frozenset()), None)


@pytest.mark.parametrize("fault", ["missing", "failing", "silent", "latin1", "blank", "unbalanced"])
def test_without_a_library_torch_computes_and_one_line_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {
        "failing": '[ "$1" = --version ] && exit 0; echo "a.cpp:1: error: no such thing" >&2; exit 1',
        "silent": "",
        "latin1": r'[ "$1" = --version ] && exit 0; printf "a.cpp:1: error: \\344\n" >&2; exit 1',
    }
    unreadable = {"missing": str(tmp_path / "nowhere"), "blank": " ", "unbalanced": "g++ 'a"}
    command = unreadable.get(fault) or script(tmp_path / "cxx", texts[fault])
    monkeypatch.setenv("CXX", command)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        weight, x = torch.randn(20, 12), torch.randn(3, 12)
        torch.testing.assert_close(linear(x, pack_linear(weight.clone()), None), x @ weight.T)
        pack_linear(weight)
    (said,) = (message for message in caplog.messages if not message.startswith(COMPILING))
    assert len(caplog.messages) <= 2  # that it compiles is said once
    told = {"failing": "no such thing", "silent": "wrote no library", "latin1": "error"}
    assert told.get(fault, "no C++ compiler") in caplog.text
    assert "\n" not in said


def test_none_is_asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("QUIRE_CPU_ISA", "none")
    assert library() is None
    assert not caplog.messages
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx9")
    library.cache_clear()
    with pytest.raises(ConfigError, match=r"avx9.*avx2"):
        library()


def test_threads_that_come_at_once_share_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    together, loaded = threading.Barrier(4), []

    def load(wanted: object) -> object:
        time.sleep(0.05)  # the others call meanwhile
        loaded.append(object())
        return loaded[-1]

    def first_call() -> object:
        together.wait()
        return library()

    monkeypatch.setattr(library_module, "_load_best", load)
    with ThreadPoolExecutor(4) as threads:
        found = [future.result() for future in [threads.submit(first_call) for _ in range(4)]]
    assert len(loaded) == 1
    assert found == loaded * 4


def test_several_processes_compile_once(tmp_path: Path, compiler: str, sources: Path) -> None:
    """They start together, one compiles, and all have the library; a broken one is compiled again."""
    calls = tmp_path / "calls"
    counted = script(tmp_path / "cxx", f'[ "$1" = --version ] || echo x >> {calls}; sleep 0.3; exec {compiler} "$@"')
    command = [sys.executable, "-c", BUILD, str(sources), counted, str(tmp_path / "cache")]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)

    (said,) = {process.communicate()[0] for process in [start(), start(), start()]}
    path = Path(said.rstrip("\n"))
    once = len(list(sources.glob("*.cpp"))) + 2  # with the precompiled header, and the linker
    assert len(calls.read_text().split()) == once
    assert [entry.suffix for entry in sorted(path.parent.iterdir())] == [".lock", ".so"], "nothing is left of the work"
    ctypes.CDLL(str(path))
    whole = path.read_bytes()
    path.unlink()  # what this process has loaded stays as it is, also when it is unloaded
    path.write_bytes(whole[:1000])
    assert start().communicate()[0] == said
    assert len(calls.read_text().split()) == 2 * once


@pytest.mark.usefixtures("sources")
def test_other_flags_are_another_library(tmp_path: Path, compiler: str) -> None:
    first, other = (build([compiler], tmp_path, this_processor(), "avx2", (*FLAGS, flag)) for flag in ("-DA", "-DB"))
    assert first != other


@pytest.mark.usefixtures("sources")
def test_an_old_compiler_gets_an_older_instruction_set(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if usable_instruction_sets(this_processor(), None) == ["avx2"]:
        pytest.skip("this processor has nothing newer")
    refuse = 'for a; do case $a in -mavx512*) echo "error: unrecognized $a" >&2; exit 1; esac; done'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", f'{refuse}; exec {compiler} "$@"'))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library_module, "Library", lambda path, threads: path)  # it has none of the kernels
    found = library()
    assert all(message.startswith(COMPILING) for message in caplog.messages)
    (path,) = (tmp_path / "quire" / "kernels").glob("*.so")
    assert found == path
    assert "avx2" in path.name


@pytest.mark.usefixtures("sources")
def test_the_next_compiler_is_tried_where_one_fails_and_none_is_asked_when_the_library_is_there(
    tmp_path: Path, compiler: str
) -> None:
    calls = tmp_path / "calls"
    broken = script(tmp_path / "broken", f'echo broken >> {calls}; echo "error: no such plugin" >&2; exit 1')
    whole = script(tmp_path / "whole", f'echo whole >> {calls}; exec {compiler} "$@"')
    candidates = [str(tmp_path / "missing"), broken, whole]
    path = build(candidates, tmp_path / "cache", this_processor(), "avx2", FLAGS)
    assert path.exists()
    assert set(calls.read_text().split()) == {"broken", "whole"}
    calls.write_text("")
    assert build(candidates, tmp_path / "cache", this_processor(), "avx2", FLAGS) == path
    assert not calls.read_text()
    with pytest.raises(BuildError, match="no such plugin"):
        build([broken], tmp_path / "cache", this_processor(), "avx2", FLAGS)


def test_nothing_is_compiled_where_libraries_may_not_be_loaded(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    counted = script(tmp_path / "cxx", f'echo x >> {tmp_path}/calls; exec {compiler} "$@"')
    with pytest.raises(BuildError, match=r"noexec.*XDG_CACHE_HOME"):
        build([counted], tmp_path / "cache", this_processor(), "avx2", FLAGS)
    assert not (tmp_path / "calls").exists()


@pytest.mark.usefixtures("sources")
def test_where_the_cache_cannot_be_written_the_library_is_among_temporary_files(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"  # no directory can be made there, not even by root

    def compiled() -> Path:
        return build([compiler], cache, this_processor(), "avx2", FLAGS)

    path = compiled()
    assert path.parent == tmp_path / f"quire-kernels-{os.getuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert f"{cache} cannot be written: Not a directory. The CPU kernels are kept in {path.parent}" in caplog.text
    caplog.clear()
    assert compiled() == path
    assert not caplog.messages
    path.parent.chmod(0o777)  # somebody else may have put it there
    with pytest.raises(BuildError, match="cannot be written"):
        compiled()


@pytest.mark.usefixtures("sources")
def test_it_says_how_far_it_is(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "PROGRESS_S", 0.0)
    build([compiler], tmp_path, this_processor(), "avx2", FLAGS)
    assert any(re.search(r"Compiling the CPU kernels: 1 of 2 files, \d+ s", message) for message in caplog.messages)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    build([compiler], tmp_path / "other", this_processor(), "avx2", FLAGS)
    assert re.search(r"\r\033\[K.* 1 of 2 files.*\r\033\[K.* 2 of 2 files.*\r\033\[K$", terminal.getvalue())


@pytest.mark.usefixtures("sources")
def test_what_a_killed_process_left_is_removed(tmp_path: Path, compiler: str) -> None:
    def compiled() -> Path:
        return build([compiler], tmp_path, this_processor(), "avx2", FLAGS)

    path = compiled()
    path.unlink()
    left = tmp_path / f"{path.stem}-1234"
    left.mkdir()
    (left / "linear.o").write_text("half")
    assert compiled() == path
    assert not left.exists()


@pytest.mark.long("engine")
def test_sanitizers_find_nothing(tmp_path: Path, compiler: str) -> None:
    """The kernels' own tests once more, under AddressSanitizer and UBSan. Compilers leave AVX-512's masked loads out;
    with AVX2 the same code loads one by one."""
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler brings no AddressSanitizer")
    flags = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    program = (
        "import sys, pytest, quire.compute.kernels.cpu.library as l; "
        f"l.FLAGS = (*l.FLAGS, *{flags!r}); "
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'no:faulthandler', '-k', 'avx512_bf16 or avx2', "
        f"*{[str(HERE / f'test_{name}.py') for name in SANITIZED]!r}]))"
    )
    variables = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run([sys.executable, "-c", program], env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
