"""Compiles the C++ sources into a library with the machine's compiler, and keeps it where all processes of a user find
it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
STANDARD_HEADERS = ("immintrin.h", "algorithm", "cmath", "cstdint", "cstring", "limits", "vector")
"""Headers that nearly all sources include, read once for all: they take a third of a second of each compiler."""
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-mtune=native", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-w",
)  # fmt: skip
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
INSTRUCTION_SETS: dict[str, frozenset[str]] = {
    "avx512_bf16": frozenset({*_AVX512, "avx512_bf16", "avx512_vnni"}),
    "avx512_vnni": frozenset({*_AVX512, "avx512_vnni"}),
    "avx512": frozenset(_AVX512),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
"""The processor's features that each instruction set needs, the best first."""

PROGRESS_S = 5.0
"""Time between two lines of the log that say how far compiling is, in seconds."""
_TIMEOUT_S = 300
_DIGEST_SIZE = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """The library could not be built, for the reason in the message, which is one line."""


class CacheError(BuildError):
    """The directory of libraries cannot be written, or none may be loaded from it."""


@dataclass(frozen=True)
class Processor:
    """The processor that a library is compiled for.

    Attributes:
        model: The name that the processor gives itself.
        features: Its features, as Linux names them for the architecture.
        vendor: The name of who made it, as Linux gives it; "": it gives none.
    """

    model: str
    features: frozenset[str]
    vendor: str = ""

    @property
    def multiplies_bfloat16(self) -> bool:
        return not self.features.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def this_processor() -> Processor:
    """Return this machine's processor, as Linux describes its first core; reading about all cores would be slow."""
    try:
        with open("/proc/cpuinfo") as lines:
            return read_processor(lines)
    except OSError:
        return read_processor(())


def read_processor(lines: Iterable[str]) -> Processor:
    """Return the processor that /proc/cpuinfo describes in its lines up to the first empty one."""
    told = {}
    for line in lines:
        key, _, value = line.partition(":")
        if not key.strip():
            break
        told[key.strip()] = value.strip()
    features = told.get("flags") or told.get("Features", "")  # on x86 and Arm
    return Processor(told.get("model name", platform.machine()), frozenset(features.split()), told.get("vendor_id", ""))


def usable_instruction_sets(processor: Processor, at_most: str | None) -> list[str]:
    """Return the names of the instruction sets that the processor has and the user allows, the best first.

    On Intel's processors bf16 is widened unless it is asked for by name: their instruction that adds products of bf16
    multiplies half as much in a cycle as that of floats (uops.info, VDPBF16PS).

    Args:
        processor: The processor that the kernels run on.
        at_most: The best of INSTRUCTION_SETS that may be used; None: all may.

    Raises:
        BuildError: No instruction set is left.
    """
    names = list(INSTRUCTION_SETS)
    allowed = names[names.index(at_most) if at_most else 0 :]
    if at_most is None and processor.vendor == "GenuineIntel":
        allowed.remove("avx512_bf16")
    if usable := [name for name in allowed if INSTRUCTION_SETS[name] <= processor.features]:
        return usable
    raise BuildError("the kernels need a processor with AVX2")


def can_build(compilers: Sequence[str], processor: Processor, at_most: str | None) -> bool:
    """Whether building the library is likely to succeed, judging by what is installed.

    Args:
        compilers: Commands of compilers, as in `build`.
        processor: The processor that the library is for.
        at_most: As in `usable_instruction_sets`, or "none" if no library is wanted.
    """
    try:
        return (
            at_most != "none"
            and bool(usable_instruction_sets(processor, at_most))
            and bool(installed_compilers(compilers))
        )
    except BuildError:
        return False


def installed_compilers(candidates: Sequence[str]) -> list[list[str]]:
    """Return the commands whose program is installed, split into words, with the program's full path."""
    found = []
    for candidate in candidates:
        try:
            words = shlex.split(candidate)
        except ValueError:  # a quote is not closed
            words = []
        if words and (path := shutil.which(words[0])):
            found.append([path, *words[1:]])
    return found


def build(
    candidates: Sequence[str], cache: Path, processor: Processor, instructions: str, flags: Sequence[str]
) -> Path:
    """Compile the library, unless it is there, and return its path.

    Args:
        candidates: Commands of compilers; the first one that is installed and does not fail is used.
        cache: The directory of libraries.
        processor: The processor that the library is for.
        instructions: One of INSTRUCTION_SETS.
        flags: Flags of the compiler and the linker.

    Raises:
        BuildError: There is no compiler, or all fail, or the directory cannot be written or loaded from.
    """
    compilers = installed_compilers(candidates)
    if not compilers:
        raise BuildError(f"there is no C++ compiler ({', '.join(candidates)}); on Debian and Ubuntu, apt install g++")
    flags = (*flags, *sorted("-m" + feature.replace("_", "") for feature in INSTRUCTION_SETS[instructions]))
    names = [f"cpu-{instructions}-{_hash(compiler, processor.model, flags)}.so" for compiler in compilers]
    for directory in (cache, _temporary_cache()):
        for name in names:
            if directory is not None and _is_whole(directory / name):
                return directory / name
    failures = []
    for compiler, name in zip(compilers, names, strict=True):
        try:
            return _build_somewhere(compiler, flags, cache / name)
        except BuildError as error:
            failures.append(error)
    raise failures[0]


def _build_somewhere(compiler: list[str], flags: Sequence[str], target: Path) -> Path:
    """Compile the library in the cache, or where that cannot be used in the directory of temporary files."""
    try:
        return _build_once(compiler, flags, target)
    except CacheError as error:
        if (directory := _temporary_cache(make=True)) is None:
            raise
        _log.warning("%s. The CPU kernels are kept in %s for now.", error, directory)
        return _build_once(compiler, flags, directory / target.name)


def _temporary_cache(make: bool = False) -> Path | None:
    """Return this user's directory of libraries among temporary files; None if there is none that only they can write,
    since what lies there is loaded."""
    directory = Path(tempfile.gettempdir()) / f"quire-kernels-{os.getuid()}"
    try:
        if make:
            directory.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(directory)
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return directory if private else None


def _build_once(compiler: list[str], flags: Sequence[str], target: Path) -> Path:
    """Compile the library in one process; others wait for it."""
    cache = target.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.statvfs(cache).f_flag & os.ST_NOEXEC:
            raise CacheError(f"no library may be loaded from {cache} (noexec); set XDG_CACHE_HOME to another disk")
        with (cache / f"{target.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                for left in cache.glob(f"{target.stem}-*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                _compile(compiler, flags, target)
    except OSError as error:
        raise CacheError(f"{cache} cannot be written: {error.strerror or error}") from None
    return target


def _compile(compiler: list[str], flags: Sequence[str], target: Path) -> None:
    _announce((_run([*compiler, "--version"]) or "?").splitlines()[0], target.parent)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix=f"{target.stem}-", dir=target.parent) as directory,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # what takes longest first
        objects = [Path(directory) / f"{source.stem}.o" for source in sources]
        common = [*compiler, *flags]
        with _Progress(len(sources)) as progress:
            try:
                first = pool.submit(_run, [*common, "-c", str(sources[0]), "-o", str(objects[0])])  # beside the headers
                common += _precompiled(compiler, flags, Path(directory))
                rest = [[*common, "-c", str(s), "-o", str(o)] for s, o in zip(sources[1:], objects[1:], strict=True)]
                for done in as_completed([first, *(pool.submit(_run, command) for command in rest)]):
                    done.result()
                    progress.step()
            except BaseException:  # an interrupt, too
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        whole = Path(directory) / target.name
        _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(whole)])
        if not whole.exists():
            raise BuildError(f"{compiler[0]} wrote no library")
        with whole.open("ab") as library:
            library.write(hashlib.sha256(whole.read_bytes()).digest())
        os.replace(whole, target)
    _log.info("Compiled the CPU kernels in %.1f s", time.monotonic() - began)


def _precompiled(compiler: list[str], flags: Sequence[str], directory: Path) -> list[str]:
    """Compile the standard headers into the directory. Returns the flags that let a source begin with them; none if the
    compiler, or the machine, has no such headers."""
    header = directory / "standard.h"
    header.write_text("".join(f"#include <{name}>\n" for name in STANDARD_HEADERS))
    try:
        _run([*compiler, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    except BuildError:
        return []
    return ["-include", str(header)]


class _Progress:
    """Says how many sources are compiled: on a terminal in one line, which is gone at the end, else now and then in the
    log."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = self._said = time.monotonic()

    def step(self) -> None:
        """One more is compiled."""
        self._done += 1
        now = time.monotonic()
        said = f"Compiling the CPU kernels: {self._done} of {self._total} files, {now - self._began:.0f} s"
        if sys.stderr.isatty():
            print(f"\r\033[K{said}", end="", file=sys.stderr, flush=True)
        elif now - self._said >= PROGRESS_S and self._done < self._total:
            self._said = now
            _log.warning("%s", said)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._done and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@functools.cache  # once, although a compiler may be tried with several instruction sets
def _announce(compiler: str, directory: Path) -> None:
    # A warning is shown even where logs are not set up; otherwise a program would stand still without a word.
    _log.warning(
        "Compiling the CPU kernels with %s, once: on two cores it takes 15 s. They are kept in %s",
        compiler,
        directory,
    )


def _is_whole(target: Path) -> bool:
    """Whether the library is there and ends with the hash of the rest; the loader would crash on an incomplete one."""
    try:
        content = target.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_SIZE]).digest() == content[-_DIGEST_SIZE:]


def _hash(compiler: list[str], processor: str, flags: Sequence[str]) -> str:
    """Hash all that the library depends on; the compiler's file stands for its version, which takes time to ask for."""
    program = os.stat(compiler[0])
    known = (compiler, os.path.realpath(compiler[0]), program.st_size, program.st_mtime_ns)
    parts = hashlib.sha256(repr((known, processor, flags)).encode())
    for source in sorted(SOURCES.iterdir()):
        parts.update(source.name.encode() + b"\0" + source.read_bytes())
    return parts.hexdigest()[:16]


def _run(command: Sequence[str]) -> str:
    """Run a command and return what it prints, or raise BuildError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{command[0]} failed: {lines[0].strip()}")
    return done.stdout
