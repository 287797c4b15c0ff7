"""`python -m quire`: the `quire` command where its script is not on the path."""

from quire.cli.main import main

main()
