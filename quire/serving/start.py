"""The API process: `python -m quire.serving.start`, started by the supervisor."""

from __future__ import annotations

import importlib

from quire.foundation.processes.child_main import run_child
from quire.foundation.processes.garbage import no_collection

if __name__ == "__main__":
    with no_collection():  # which took a tenth of the time of imports
        api_server = importlib.import_module("quire.serving.api_server")
    run_child(api_server.main, "api")
