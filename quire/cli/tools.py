"""The commands of `quire.tools` with their flags, and `quire collect-env`.

Code that computes is imported by name, because it loads torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any

from quire.cli.flags import parse, parse_with_engine
from quire.errors import ConfigError, did_you_mean
from quire.foundation.config import environment
from quire.tools.bench.system_info import system_info, versions
from quire.tools.quant_check.options import CheckOptions
from quire.tools.simulation.options import SimulateOptions
from quire.tools.sizing.options import PlanOptions

BENCHMARKS = {
    "throughput": ("offline:run_throughput", "ThroughputOptions", "all prompts at once, in this process"),
    "latency": ("offline:run_latency", "LatencyOptions", "one batch at a time, in this process"),
    "serve": ("serve:run", "ServeOptions", "load on a running server"),
    "agent": ("agent:run", "AgentOptions", "sessions of coding agents on a running server"),
    "startup": ("startup:run", "StartupOptions", "from the process's start until it takes work, by stage"),
    "kernels": ("kernels:run", "KernelsOptions", "each kernel on its own, against what the device reaches"),
    "regress": ("regress:run", "RegressOptions", "whether newer figures are worse than older ones"),
}
"""By name: module and function in quire.tools.bench, the options' class there, and what is measured."""
WITHOUT_ENGINE = ("serve", "agent", "kernels", "regress")
GIB = 2**30
COLLECT_DESCRIPTION = "Show versions, machine and settings for a bug report. Keys and tokens are not shown."


@dataclass(frozen=True)
class CollectOptions:
    """How the facts are written."""

    json: bool = False
    """As JSON."""


def check_quant(arguments: Sequence[str]) -> int:
    """Compare two models. Returns the exit code: 0 if the quantized one is good, 1 if it is bad or that is unclear."""
    return _run("check-quant", CheckOptions, "quire.tools.quant_check.check", arguments)


def plan(arguments: Sequence[str]) -> int:
    """Plan. Returns the exit code: 0, or 1 if nothing keeps the targets."""
    return _run("plan", PlanOptions, "quire.tools.sizing.command", arguments)


def simulate(arguments: Sequence[str]) -> int:
    """Simulate. Returns the exit code: 0, or 1 if the limits of --slo are not kept."""
    return _run("simulate", SimulateOptions, "quire.tools.simulation.command", arguments)


def bench(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names; returns its exit code. Raises QuireError if it could not run."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS)
        raise ConfigError(f"'{name}' is not a benchmark.{hint} Benchmarks: {', '.join(BENCHMARKS)}.")
    place, options_name, _ = BENCHMARKS[name]
    module_name, function = place.split(":")
    module = importlib.import_module(f"quire.tools.bench.{module_name}")
    options_type, measure, program = getattr(module, options_name), getattr(module, function), f"quire bench {name}"
    code: int
    if name in WITHOUT_ENGINE:
        code = measure(parse(options_type, rest, program, options_type.DESCRIPTION))
    else:
        options, config = parse_with_engine(options_type, rest, program, options_type.DESCRIPTION)
        code = measure(options, environment.apply(config))
    return code


def collect_env(arguments: Sequence[str]) -> int:
    """Print the facts; returns the exit code."""
    options = parse(CollectOptions, arguments, "quire collect-env", COLLECT_DESCRIPTION)
    facts = {"versions": versions(), "machine": system_info(), "environment": environment.shown_variables()}
    if options.json:
        print(dumps(facts, indent=2))
        return 0
    here = facts["machine"]
    limit = here["memory_limit_bytes"]
    lines = [
        f"system      {here['system']}",
        f"processor   {here['processor']}, {here['cores']} cores: {' '.join(here['processor_flags']) or 'plain'}",
        f"memory      {here['memory_bytes'] / GIB:.1f} GiB" + (f", limited to {limit / GIB:.1f} GiB" if limit else ""),
        *(f"gpu         {', '.join(gpu.values())}" for gpu in here["gpus"] or [{"": "none"}]),
        *(f"link        {cards}: {link}" for cards, link in here["gpu_links"].items()),
        *(f"{name:<20} {version}" for name, version in facts["versions"].items()),
        *(f"{name}={value}" for name, value in facts["environment"].items()),
    ]
    print("\n".join(lines))
    return 0


def _run(name: str, options_type: type[Any], module_name: str, arguments: Sequence[str]) -> int:
    options = parse(options_type, arguments, f"quire {name}", options_type.DESCRIPTION)
    code: int = importlib.import_module(module_name).run(options)
    return code


def _usage() -> str:
    lines = "\n".join(f"  {name:<11} {what}" for name, (_, _, what) in BENCHMARKS.items())
    return (
        f"usage: quire bench BENCHMARK [flags]\n\n{lines}\n\n'quire bench BENCHMARK --help' lists its flags by group."
    )
