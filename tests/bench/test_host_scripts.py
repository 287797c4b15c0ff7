"""The scripts that time the host alone run and print what they promise; the sweeps for a GPU can still be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SWEEPS = sorted((ROOT / "tuning").glob("*/tune_*.py"))


SCRIPTS: list[tuple[str, list[str], list[str]]] = [
    ("host_step.py", ["--sequences", "3", "--steps", "8"], ["worker_ms", "engine_ms"]),
    ("host_drafts.py", ["--rows", "1,2", "--steps", "8", "--method", "eagle3"], ["by_plain", '"drafts": 4']),
    ("host_drafts.py", ["--rows", "2", "--steps", "8", "--method", "ngram", "--drafts", "0"], ["by_plain"]),
    ("host_request.py", ["--tokens", "5,40", "--runs", "2"], ["40 tokens", "2,000 cached + 50", "after"]),
    ("host_request.py", ["--tokens", "5,40", "--runs", "2", "--cold"], ["launch"]),
    ("host_choices.py", ["--tokens", "300", "--choices", "1,3", "--runs", "2"], ["3 choices", "longest turn"]),
    ("host_arrivals.py", ["--requests", "16", "--runs", "1"], ["refused chat", "arrival chat", "end"]),
    ("live_frames.py", ["--sequences", "4", "--steps", "9", "--blocks", "600"], ["a step", "of a core"]),
    ("router.py", ["--seconds", "1", "--rate", "20"], ["whole", "streams", "added", "µs of processor time"]),
    ("kv_waste.py", ["--requests", "40", "--blocks", "1024"], ["waste"]),
]
"""Scripts, their arguments, and words of what they print."""
RUN = """
import json, runpy, sys
for at, (script, arguments, _) in enumerate(json.loads(sys.argv[1])):
    print(f"<{at}>", flush=True)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
"""


def test_scripts_run() -> None:
    """In one process, which imports torch once."""
    scripts = [(str(BENCHMARKS / script), arguments, said) for script, arguments, said in SCRIPTS]
    command = [sys.executable, "-c", RUN, json.dumps(scripts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for at, (script, arguments, said) in enumerate(SCRIPTS):
        printed = done.stdout.partition(f"<{at}>")[2].partition(f"<{at + 1}>")[0]
        assert all(words in printed for words in said), (script, arguments, printed)


def test_sweeps_find_what_they_tune() -> None:
    """Their imports name kernels and constants that exist."""
    assert len(SWEEPS) == 11
    load = "import importlib, sys; sys.path.insert(0, sys.argv[1]); [importlib.import_module(n) for n in sys.argv[2:]]"
    names = [sweep.stem for sweep in SWEEPS]
    done = subprocess.run(
        [sys.executable, "-c", load, str(SWEEPS[0].parent), *names], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
