"""What a newcomer waits for on an empty machine: seconds to install, to the first answer, and to the second start, and
what was said meanwhile.

    python benchmarks/first_hour.py [--into DIRECTORY] [--serve-only]

It makes a virtual environment and a cache in a new directory, as `make serve` does in a clone: nothing that this user
has compiled or downloaded is used, except pip's cache of packages. Every line that the programs print is printed with
the second in which it came. It ends with an error if the second start takes more than SECOND_START_S.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECOND_START_S = 2.0
QUESTION = {"model": "quill", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


class Said:
    """Prints what programs say, each line with the seconds since this began."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {line}", flush=True)


def main() -> int:
    """Run it; returns the exit code."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--into", help="an empty directory for the environment and the caches; default: a temporary one")
    flags.add_argument("--serve-only", action="store_true", help="use this Python's environment, with empty caches")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-first-hour-") as temporary:
        place = Path(given.into or temporary).resolve()
        place.mkdir(parents=True, exist_ok=True)
        return measure(place, serve_only=given.serve_only)


def measure(place: Path, *, serve_only: bool) -> int:
    """Install, start twice, and print what each took."""
    homes = {"XDG_CACHE_HOME": place / "cache", "XDG_STATE_HOME": place / "state", "XDG_CONFIG_HOME": place / "config"}
    environment = {**os.environ, **{name: str(path) for name, path in homes.items()}}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # few newcomers set it, and each start compiles all modules anew
    python, took = sys.executable, dict[str, tuple[float, float]]()
    if not serve_only:
        python = str(place / "venv" / "bin" / "python")
        took["install"] = installed(place / "venv", environment)
    took["first answer"] = answered(python, environment, "first start")
    took["second start"] = answered(python, environment, "second start")
    print()
    for what, (seconds, cpu) in took.items():
        print(f"{what:14} {seconds:7.1f} s, {cpu:6.1f} s of CPU")
    if took["second start"][0] > SECOND_START_S:
        print(f"The second start is to take at most {SECOND_START_S:.0f} s.")
        return 1
    return 0


def cpu_seconds() -> float:
    """CPU seconds of all processes that have ended, which tell more than the clock on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def installed(venv: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Install as `make install` does; returns the seconds, and those of CPU."""
    print("# install")
    before = cpu_seconds()
    said = Said()
    command = ["make", "--no-print-directory", "-C", str(ROOT), "install", f"VENV={venv}", f"PYTHON={sys.executable}"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as make:
        assert make.stdout is not None
        for line in make.stdout:
            said(line.rstrip())
    if make.returncode != 0:
        raise SystemExit(f"make install ended with {make.returncode}")
    return time.monotonic() - said.began, cpu_seconds() - before


def answered(python: str, environment: Mapping[str, str], title: str) -> tuple[float, float]:
    """Start a server, ask a question, and end it. Returns the seconds from the command to the answer, and those of CPU
    up to the end."""
    print(f"# {title}")
    before = cpu_seconds()
    said = Said()
    command = [python, "-m", "quire.cli.main", "serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            address = next(addresses(server, said), None)
            if address is None:
                raise SystemExit(f"The server ended with {server.wait()}.")
            body = json.dumps(QUESTION).encode()
            request = urllib.request.Request(f"{address}/chat/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = json.load(answer)["choices"][0]["message"]["content"]
            seconds = time.monotonic() - said.began
            said(f"answer: {text}")
        finally:
            server.terminate()
            server.communicate()
    return seconds, cpu_seconds() - before


def addresses(server: subprocess.Popen[str], said: Said) -> Iterator[str]:
    """The addresses of the API that the server says, as it says them."""
    assert server.stdout is not None
    for line in server.stdout:
        said(line.rstrip())
        if found := re.search(r"OpenAI clients\s+(\S+)", line):
            yield found[1]


if __name__ == "__main__":
    sys.exit(main())
