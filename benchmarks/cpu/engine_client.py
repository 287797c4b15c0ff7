"""An engine's processes, seen from outside: their answers, memory, and what else the machine does meanwhile.

Between rows they are stopped (SIGSTOP), so that an engine whose idle threads spin does not slow down the next one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_HERE = Path(__file__).parent
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class EngineFailed(Exception):
    """An engine cannot be measured; the message says why in one line."""


class EngineClient:
    """One engine, started; close it at the end.

    Args:
        name: Module of `engines`.
        python: Interpreter that has it.
        checkpoint: Its model.
        max_running: Sequences that it may serve at once.
        vocab_size: Of the model.
        log: What it prints.

    Raises:
        EngineFailed: It does not start.
    """

    def __init__(self, name: str, python: str, checkpoint: Path, max_running: int, vocab_size: int, log: Path) -> None:
        self.name = name
        self._log = log
        self._random = random.Random(name)
        self._vocab_size = vocab_size
        began = time.perf_counter()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, "engine_process.py", name, str(checkpoint), str(max_running)],
                cwd=_HERE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(_HERE), str(_HERE.parents[1])])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        try:
            self.version: str = self._answer()["version"]
            self.seconds((8,), (1,))
        except BaseException:
            self.close()
            raise
        self.first_token_s = time.perf_counter() - began

    def seconds(self, inputs: Sequence[int], outputs: Sequence[int]) -> float:
        """How long it takes for prompts of these lengths, new at each call, and outputs of those.

        Raises:
            EngineFailed: It does not answer, or with other lengths.
        """
        prompts = [[self._random.randrange(3, self._vocab_size) for _ in range(n)] for n in inputs]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "outputs": list(outputs)}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Its processes run; before and after they are stopped."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop its processes until they are awake again."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def busy_seconds(self) -> float:
        """Processor time that all its processes have taken."""
        return sum(int(fields[11]) + int(fields[12]) for fields in self._stats()) * _TICK_S

    def peak_rss_gb(self) -> float:
        """The largest resident memory of each of its processes, added up; what they share counts for each."""
        lines = [line for path in self._paths() for line in _read(path / "status").splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e9

    def close(self) -> None:
        """End all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        said = self._log.read_text(errors="replace").splitlines() or ["nothing"]
        raise EngineFailed(f"it ended, and said last: {said[-1].strip()[:200]}")

    def _paths(self) -> list[Path]:
        """Of its processes in /proc: those of the session that it began."""
        session = str(self._process.pid)
        found = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [path for path in found if (fields := _stat(path)) and fields[3] == session]

    def _stats(self) -> list[list[str]]:
        return [fields for path in self._paths() if (fields := _stat(path))]


def machine_busy_seconds() -> float:
    """Processor time that everything on this machine has taken."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) * _TICK_S


def stolen_seconds() -> float:
    """Processor time that a hypervisor gave to somebody else."""
    return int(Path("/proc/stat").read_text().split()[8]) * _TICK_S


def _stat(path: Path) -> list[str]:
    """The fields behind the name in /proc/PID/stat; empty if the process is gone."""
    return _read(path / "stat").rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
