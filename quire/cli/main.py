"""The `quire` command. Only the subcommand that is asked for is imported."""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence

from quire.cli.interrupts import ended_by_interrupt
from quire.errors import QuireError, SetupError, did_you_mean
from quire.version import __version__

COMMANDS = {
    "serve": ("quire.cli.early_engine:serve", "serve a model over the OpenAI API"),
    "route": ("quire.cli.route", "one address in front of several servers and models"),
    "chat": ("quire.cli.chat:chat", "chat with a running server"),
    "complete": ("quire.cli.chat:complete", "complete text with a running server"),
    "launch": ("quire.cli.launch", "start a coding agent against a running server"),
    "run-batch": ("quire.cli.run_batch", "answer the requests of a file, without a server"),
    "check-quant": ("quire.cli.tools:check_quant", "measure what quantization costs a model, and name the layers"),
    "plan": ("quire.cli.tools:plan", "plan devices, memory and cost for a model"),
    "simulate": ("quire.cli.tools:simulate", "serve a load in virtual time: latencies, and the rate that keeps limits"),
    "bench": ("quire.cli.tools:bench", "measure throughput, latency, a server under load, or start-up"),
    "collect-env": ("quire.cli.tools:collect_env", "show versions and machine for a bug report"),
}
"""By name: the module, and its function unless that is `run`; and what the command does."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand, and exit with its code. An expected error is one line on standard error."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(_usage())
        raise SystemExit(0)
    if name in ("-v", "--version", "version"):
        print(__version__)
        raise SystemExit(0)
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        print(f"quire: error: '{name}' is not a command.{hint} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        raise SystemExit(2)
    try:
        with ended_by_interrupt():
            module_name, _, function = COMMANDS[name][0].partition(":")
            command = getattr(importlib.import_module(module_name), function or "run")
        raise SystemExit(_run_and_flush(command, rest))
    except QuireError as error:
        print(f"quire: error: {error.message}", file=sys.stderr)
        raise SystemExit(error.exit_code if isinstance(error, SetupError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run_and_flush(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command and flush its output. Returns its exit code, or 141 if the reader has gone (`… | head -1`)."""
    try:
        code = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it fails again at exit
        return 141
    return code


def _reader_left() -> bool:
    """Whether standard output is the broken pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always reported
    return bool(poll.poll(0))


def _usage() -> str:
    lines = "\n".join(f"  {name:<12} {what}" for name, (_, what) in COMMANDS.items())
    return f"usage: quire COMMAND [flags]\n\n{lines}\n\n'quire COMMAND --help' lists its flags by group."


if __name__ == "__main__":
    main()
