"""`python -m quire.entrypoints.openai.api_server --model …`: the same as `quire serve --model …`."""

from __future__ import annotations

import sys

from quire.cli.main import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
