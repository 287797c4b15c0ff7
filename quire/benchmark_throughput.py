"""`python -m quire.benchmark_throughput …`: the same as `quire bench throughput …`."""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    main(["bench", "throughput", *sys.argv[1:]])
