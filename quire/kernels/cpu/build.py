"""Compiles the C++ sources into a library with the machine's compiler, once: what was compiled is kept in a directory
that all processes of a user share. Knows nothing about what the kernels compute.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-mtune=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-w",
)
INSTRUCTION_SETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512_bf16": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
    ),
    "avx512": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"}),
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"),
    ),
    "avx2": (frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
}
"""Best first: the processor's features that each needs, and the compiler's flags."""

_TIMEOUT_S = 300
_DIGEST_SIZE = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class BuildError(Exception):
    """There is no library; the message says in one line why."""


@dataclass(frozen=True)
class Processor:
    """What a library is compiled for.

    Attributes:
        model: The name that the processor gives itself.
        features: As Linux names them, which differs by architecture.
    """

    model: str
    features: frozenset[str]

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has instructions for that."""
        return not self.features.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def this_processor() -> Processor:
    """The machine's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    features = told.get("flags") or told.get("Features", "")  # on x86 and Arm
    return Processor(told.get("model name", platform.machine()), frozenset(features.split()))


def usable_instruction_sets(processor: Processor, at_most: str | None) -> list[str]:
    """Those that the processor has and the user allows, the best first.

    Args:
        at_most: One of INSTRUCTION_SETS; those above it are not used. None: any.

    Raises:
        BuildError: There is none.
    """
    names = list(INSTRUCTION_SETS)
    allowed = names[names.index(at_most) if at_most else 0 :]
    if usable := [name for name in allowed if INSTRUCTION_SETS[name][0] <= processor.features]:
        return usable
    raise BuildError("the kernels need a processor with AVX2")


def can_build(compilers: Sequence[str], processor: Processor, at_most: str | None) -> bool:
    """Whether there is likely to be a library, by a look at what is installed.

    Args:
        compilers: Commands, see `find_compiler`.
        processor: What it is for.
        at_most: See `usable_instruction_sets`; or "none": no library is wanted.
    """
    try:
        return at_most != "none" and bool(usable_instruction_sets(processor, at_most) and _installed(compilers))
    except BuildError:
        return False


def find_compiler(candidates: Sequence[str]) -> tuple[list[str], str]:
    """The first of these commands that is there, and the version that it tells.

    Raises:
        BuildError: None is.
    """
    for command in _installed(candidates):
        return command, (_run([*command, "--version"]) or "?").splitlines()[0]
    raise BuildError(f"there is no C++ compiler ({', '.join(candidates)})")


def build(compilers: Sequence[str], cache: Path, processor: Processor, instructions: str, flags: Sequence[str]) -> Path:
    """The library's path; compiled unless it is there.

    Args:
        compilers: Commands, the first that exists is used.
        cache: Where libraries are kept.
        instructions: One of INSTRUCTION_SETS.
        flags: For the compiler and the linker.

    Raises:
        BuildError: No compiler, or it fails, or nothing can be written.
    """
    compiler, version = find_compiler(compilers)
    flags = (*flags, *INSTRUCTION_SETS[instructions][1])
    target = cache / f"cpu-{instructions}-{_hash(compiler, version, processor.model, flags)}.so"
    if _is_whole(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{target.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles, the others wait for it
            if not _is_whole(target):
                for left in cache.glob(f"{target.stem}-*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                _compile(compiler, version, flags, target)
    except OSError as error:
        raise BuildError(f"{cache} cannot be written: {error.strerror or error}") from None
    return target


def _installed(candidates: Sequence[str]) -> list[list[str]]:
    """Those of these commands whose program is there, in words."""
    found = []
    for candidate in candidates:
        try:
            words = shlex.split(candidate)
        except ValueError:  # a quote is not closed
            words = []
        if words and (path := shutil.which(words[0])):
            found.append([path, *words[1:]])
    return found


def _compile(compiler: list[str], version: str, flags: Sequence[str], target: Path) -> None:
    _log.info("Compiling the CPU kernels with %s, once; they are kept in %s", version, target.parent)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix=f"{target.stem}-", dir=target.parent) as directory,
        ThreadPoolExecutor() as pool,
    ):
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(directory) / f"{source.stem}.o" for source in sources]
        commands = [[*compiler, *flags, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
        list(pool.map(_run, commands))
        whole = Path(directory) / target.name
        _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(whole)])
        if not whole.exists():
            raise BuildError(f"{compiler[0]} wrote no library")
        with whole.open("ab") as library:
            library.write(hashlib.sha256(whole.read_bytes()).digest())
        os.replace(whole, target)
    _log.info("Compiled the CPU kernels in %.1f s", time.monotonic() - began)


def _is_whole(target: Path) -> bool:
    """Whether the library is there and ends with the hash of the rest: the loader would crash on a part of it."""
    try:
        content = target.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_SIZE]).digest() == content[-_DIGEST_SIZE:]


def _hash(compiler: list[str], version: str, processor: str, flags: Sequence[str]) -> str:
    parts = hashlib.sha256(repr((compiler, version, processor, flags)).encode())
    for source in sorted(SOURCES.iterdir()):
        parts.update(source.name.encode() + b"\0" + source.read_bytes())
    return parts.hexdigest()[:16]


def _run(command: Sequence[str]) -> str:
    """What it prints.

    Raises:
        BuildError: It fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise BuildError(f"{command[0]} failed: {lines[0].strip()}")
    return done.stdout
