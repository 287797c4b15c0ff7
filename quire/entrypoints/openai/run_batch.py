"""`python -m quire.entrypoints.openai.run_batch -i in.jsonl -o out.jsonl …`: the same as `quire run-batch …`."""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    main(["run-batch", *sys.argv[1:]])
