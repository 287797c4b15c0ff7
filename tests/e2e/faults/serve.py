"""`quire serve` whose processes fail when a test says so: `python -m tests.e2e.faults.serve FLAGS`.

The test writes what is to go wrong into the file named by FAULT_FILE. The engine takes a word away when it obeys, so a
fault happens once; those that begin with `always` stay.
"""

from __future__ import annotations

import sys

from quire.cli.flags import parse_config
from quire.foundation.config import environment
from quire.planning.auto_config import resolve
from quire.serving.supervisor.announce import announce_settings
from quire.serving.supervisor.children import Modules
from quire.serving.supervisor.listener import listen
from quire.serving.supervisor.supervisor import Supervisor

MODULES = Modules("tests.e2e.faults.engine", "tests.e2e.faults.api")


def main() -> int:
    config = environment.apply(parse_config(sys.argv[1:], "serve", "A server that fails on demand."))
    with listen(config.server) as listener:
        resolved = resolve(config, replicas=True)
        supervisor = Supervisor(resolved.config, listener, developer_mode=True, modules=MODULES)
        announce_settings(resolved.config, resolved.reasons)
        return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
