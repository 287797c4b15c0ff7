"""What Ray's driver tells a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.foundation.config import Config
from quire.planning.rank_checks import check_nodes
from quire.runtime.executor.ray_nodes.driver import follower_config

SECRET = "nobody else needs this"


def test_a_node_is_told_who_it_is_and_no_secrets_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = Config().with_values(
        model="model", hf_token="its own", pipeline_parallel_size=3, distributed_executor_backend="ray",
        api_key=(SECRET,), ssl_keyfile=SECRET, node_key_file=SECRET, cpu_threads=2,
    )  # fmt: skip
    own = follower_config(config, 2, 3, "10.0.0.1")
    check_nodes(own)
    assert SECRET not in repr(own)
    assert (own.parallel.nodes, own.parallel.node_rank, own.parallel.master_addr) == (3, 2, "10.0.0.1")
    assert own.server.headless
    assert own.model.model == str(tmp_path / "model"), "its process has another directory"
    assert (own.model.hf_token, own.device.cpu_threads) == ("its own", 2)


def test_a_model_that_is_no_path_here_keeps_its_name() -> None:
    assert follower_config(Config().with_values(model="org/name"), 1, 2, "10.0.0.1").model.model == "org/name"
