"""The interpreter of each engine: a virtual environment of its own, made where it is asked for and is not there."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from engine_client import EngineFailed

_ENGINES = Path(__file__).parent / "engines"
_TIMEOUT_S = 1800


def interpreter(engine: str, environments: Path, install: bool) -> str:
    """The Python that runs this engine.

    Raises:
        EngineFailed: There is none; the message says why in one line.
    """
    constants = _constants(engine)
    if constants["PACKAGES"] is None:
        return sys.executable
    environment = environments / engine
    python = environment / "bin" / "python"
    if python.exists():
        return str(python)
    if not install:
        raise EngineFailed(f"{environment} is not there; --install makes it")
    _run([sys.executable, "-m", "venv", str(environment)], {})
    try:
        _run([str(python), "-m", "pip", "install", "-q", *constants["PACKAGES"]], constants.get("BUILD", {}))
    except EngineFailed:
        python.unlink()  # so that the next time tries again
        raise
    return str(python)


def gguf_file(checkpoint: Path, types: str, environments: Path, install: bool) -> Path:
    """The checkpoint as a GGUF file of these types, made by llama.cpp's quantizer unless it is there.

    Raises:
        EngineFailed: There is no llama.cpp, or it cannot make it.
    """
    python = interpreter("llama_cpp", environments, install)
    command = [python, "-m", "engines.llama_cpp_files", str(checkpoint), types]
    done = subprocess.run(
        command, cwd=_ENGINES.parent, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
    )
    if done.returncode:
        raise EngineFailed((done.stderr.splitlines() or ["?"])[-1])
    return Path(done.stdout.splitlines()[-1])


def _constants(engine: str) -> dict:
    """PACKAGES and BUILD of the engine's module, which only its own interpreter can import."""
    tree = ast.parse((_ENGINES / f"{engine}.py").read_text())
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("PACKAGES", "BUILD")
    }


def _run(command: list[str], variables: dict[str, str]) -> None:
    print("installing:", *command[-4:], file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"it could not be installed within {_TIMEOUT_S} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["?"]
        raise EngineFailed(f"it cannot be installed: {errors[-1].strip()}")
