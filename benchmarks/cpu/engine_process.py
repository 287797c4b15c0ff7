"""One engine in its own environment: answers requests of `compare.py`, a JSON line each.

    python engine_process.py ENGINE CHECKPOINT MAX_RUNNING

The first line says that it has loaded. Then for {"prompts": [[token ids] …], "outputs": [tokens …]} it answers with
the seconds that it took. Whatever else an engine prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time


def main(engine: str, checkpoint: str, max_running: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    loaded = importlib.import_module(f"engines.{engine}").Engine(checkpoint, int(max_running))
    print(json.dumps({"version": loaded.version}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        counts = loaded.generate(request["prompts"], request["outputs"])
        seconds = time.perf_counter() - began
        if counts != request["outputs"]:
            raise RuntimeError(f"Outputs have other lengths than asked for: {counts[:8]}, not {request['outputs'][:8]}")
        print(json.dumps({"seconds": seconds}), file=answers)


if __name__ == "__main__":  # some engines start processes that import this
    main(*sys.argv[1:])
