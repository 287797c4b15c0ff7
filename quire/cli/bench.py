"""`quire bench`: which benchmark there is, and its flags.

Benchmarks are loaded by name, because those that compute load torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from quire.cli.flags import parse, parse_with_engine
from quire.errors import ConfigError, did_you_mean
from quire.foundation.config import environment

BENCHMARKS = {
    "throughput": ("quire.tools.bench.throughput:ThroughputOptions", "all prompts at once, in this process"),
    "latency": ("quire.tools.bench.latency:LatencyOptions", "one batch at a time, in this process"),
    "serve": ("quire.tools.bench.serve:ServeOptions", "load on a running server"),
    "startup": ("quire.tools.bench.startup:StartupOptions", "from the process's start until it takes work, by stage"),
    "kernels": ("quire.tools.bench.kernels:KernelsOptions", "each kernel on its own, against what the device reaches"),
    "regress": ("quire.tools.bench.regress:RegressOptions", "whether newer figures are worse than older ones"),
}
WITHOUT_ENGINE = ("serve", "kernels", "regress")


def run(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names; its exit code.

    Raises:
        QuireError: A wrong flag, or the benchmark could not run.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS)
        raise ConfigError(f"'{name}' is not a benchmark.{hint} Benchmarks: {', '.join(BENCHMARKS)}.")
    module_name, options_name = BENCHMARKS[name][0].split(":")
    module = importlib.import_module(module_name)
    options_type, program = getattr(module, options_name), f"quire bench {name}"
    code: int
    if name in WITHOUT_ENGINE:
        code = module.run(parse(options_type, rest, program, module.DESCRIPTION))
    else:
        options, config = parse_with_engine(options_type, rest, program, module.DESCRIPTION)
        code = module.run(options, environment.apply(config))
    return code


def _usage() -> str:
    lines = "\n".join(f"  {name:<11} {what}" for name, (_, what) in BENCHMARKS.items())
    return (
        f"usage: quire bench BENCHMARK [flags]\n\n{lines}\n\n'quire bench BENCHMARK --help' lists its flags by group."
    )
