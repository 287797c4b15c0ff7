"""An engine process that is begun before its settings are known: `python -m quire.engine.early_start`.

It imports what an engine with one rank on a CPU needs, torch too, and then goes on as `quire.engine.start` does.
"""

from __future__ import annotations

import importlib

from quire.engine import start
from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.garbage import no_collection
from quire.runtime.executor.early_loading import begin_loading

if __name__ == "__main__":
    with no_collection():
        begin_loading(meta_kernels=False)
        importlib.import_module("quire.engine.process")
        importlib.import_module("quire.runtime.worker.worker")
    run_child(start.main, "engine")
