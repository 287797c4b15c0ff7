"""What the head tells other nodes of its settings, and what they keep of their own."""

from __future__ import annotations

import pytest

from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.runtime.executor.nodes.follower import Follower
from quire.runtime.executor.nodes.head_ranks import for_others

SECRET = "nobody else needs this"


def test_nodes_are_not_told_secrets() -> None:
    config = Config().with_values(api_key=(SECRET,), hf_token=SECRET, node_key_file=SECRET, ssl_keyfile=SECRET)
    assert SECRET in repr(config)
    assert SECRET not in repr(for_others(config))


def test_a_node_takes_the_heads_settings_but_for_what_is_its_machines(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_NODE_KEY", "0123456789abcdef")
    sizes = {"nnodes": 2, "pipeline_parallel_size": 2}
    head = Config().with_values(
        **sizes, model="/heads/model", dtype="float32", max_num_seqs=7, num_gpu_blocks_override=100, cpu_threads=8
    )
    here = str(tmp_path)
    own = Config().with_values(
        **sizes, model=here, node_rank=1, headless=True, num_gpu_blocks_override=60, cpu_threads=2, max_num_seqs=9,
        log_format="json", hf_token=SECRET,
    )  # fmt: skip
    config = Follower(own, SystemClock(), print)._own(for_others(head))
    assert (config.model.model, config.model.hf_token, config.parallel.node_rank) == (here, SECRET, 1)
    assert (config.device.cpu_threads, config.observability.log_format) == (2, "json")
    assert (config.model.dtype, config.scheduler.max_num_seqs) == ("float32", 7)
    assert config.cache.num_gpu_blocks_override == 60, "the smaller memory counts"
