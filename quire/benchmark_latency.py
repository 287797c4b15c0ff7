"""`python -m quire.benchmark_latency …`: the same as `quire bench latency …`."""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    main(["bench", "latency", *sys.argv[1:]])
