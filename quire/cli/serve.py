"""`quire serve`: settings from flags, choices from model and machine, then the supervisor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.cli.flags import parse_config
from quire.errors import ConfigError, EngineDeadError, SetupError
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config, environment
from quire.foundation.processes.child_process import ChildProcess
from quire.foundation.processes.launch import EXIT_CRASHED
from quire.foundation.processes.logs import apply_log_config
from quire.planning.auto_config import resolve
from quire.serving.supervisor.announce import announce_settings, log_as_json, print_error, print_log
from quire.serving.supervisor.listener import listen
from quire.serving.supervisor.process_host import ProcessHost, StartChild
from quire.serving.supervisor.supervisor import Supervisor

DESCRIPTION = "Serve a model over the OpenAI API: quire serve [MODEL] [flags]. Default model: the built-in Quill."


def run(arguments: Sequence[str], start: StartChild = ChildProcess) -> int:
    """Serve until the server ends; returns its exit code. `start` starts its processes. Raises SetupError if the server
    cannot start."""
    config = parse_config(arguments, "quire serve", DESCRIPTION)
    if not config.server.api_key and {"--api-key", "--api_key"} & set(arguments):
        raise ConfigError("--api-key has no key: give one, or leave the flag out to serve without one.")
    config = environment.apply(config)
    with_ray = config.parallel.distributed_executor_backend == "ray"
    if config.parallel.nodes > 1 and not with_ray:
        environment.node_key(config.parallel.node_key_file)  # raises an error at once if there is none

    def reread() -> Config:
        return environment.apply(parse_config(arguments, "quire serve", DESCRIPTION))

    as_json = config.observability.log_format == "json"
    if as_json:
        log_as_json()
    try:
        if config.server.log_config_file is not None:
            apply_log_config(config.server.log_config_file)
        return _serve(config, reread, start)
    except EngineDeadError as error:  # of a follower, or of nodes that Ray has started
        print_error(error.message)
        return EXIT_CRASHED
    except SetupError as error:
        if not as_json:
            raise
        print_error(error.message)
        return error.exit_code


def _serve(config: Config, reread: Callable[[], Config], start: StartChild) -> int:
    if config.server.headless:
        return _follow(config)
    if config.parallel.distributed_executor_backend == "ray":
        return _serve_with_ray(config, reread)
    with listen(config.server) as listener:
        resolved = resolve(config, replicas=True)
        supervisor = Supervisor(
            resolved.config,
            listener,
            environment.developer_mode(),
            host=ProcessHost(start),
            asked=config,
            reread=reread,
        )
        announce_settings(resolved.config, resolved.reasons)
        return supervisor.run()


def _serve_with_ray(config: Config, reread: Callable[[], Config]) -> int:
    """Serve as `_serve` does, with nodes that Ray starts. They choose their settings while the head chooses its own."""
    from quire.runtime.executor.ray_nodes.launcher import RayNodes

    with listen(config.server) as listener, RayNodes(config, SystemClock(), print_log) as nodes:
        nodes.place()
        placed = nodes.placed(config)
        resolved = resolve(placed, replicas=True)
        announce_settings(resolved.config, resolved.reasons)
        nodes.wait_ready()
        return Supervisor(
            resolved.config, listener, environment.developer_mode(), asked=placed,
            reread=lambda: nodes.placed(reread()),
        ).run()  # fmt: skip


def _follow(config: Config) -> int:
    from quire.runtime.executor.nodes.follower import Follower

    resolved = resolve(config)
    announce_settings(resolved.config, resolved.reasons)
    return Follower(resolved.config, SystemClock(), print_log).run()
