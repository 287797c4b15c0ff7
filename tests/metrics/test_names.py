"""Names, types and labels: one golden file, which a live server's page and the documentation must agree with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from docs import metrics_table
from tests.api.server import running

GOLDEN = Path(__file__).with_name("names.txt")
VLLM_NAMES = Path(__file__).with_name("vllm_names.txt")
BASE_LABELS = ("model_name", "engine")
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
TYPES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """/metrics after one request."""
    with running(tmp_path_factory.mktemp("model")) as server:
        assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status_code == 200
        return server.get("/metrics").text


def labels_of(family: Metric) -> str:
    names = {name for sample in family.samples for name in sample.labels} - {"le"}
    if family.name == "vllm:cache_config_info":
        assert {"block_size", "gpu_memory_utilization", "num_gpu_blocks"} <= names
        names = {"engine", "model_name", "…"}  # and every setting of the cache
    return ",".join(sorted(names))


def test_the_page_has_exactly_the_golden_names_types_and_labels(page: str) -> None:
    found = sorted(f"{f.name} {f.type} {labels_of(f)}".rstrip() for f in text_string_to_metric_families(page))
    assert found == GOLDEN.read_text().splitlines()


def test_every_metric_of_vllm_is_here_or_waits_for_its_capability(page: str) -> None:
    families = {f.name: f for f in text_string_to_metric_families(page)}
    listed = [line.split(" ", 3) for line in VLLM_NAMES.read_text().splitlines() if not line.startswith("#")]
    assert len(listed) > 70
    for name, kind, labels, state in listed:
        if state == "here":
            own = ",".join(label for label in labels_of(families[name]).split(",") if label not in BASE_LABELS)
            assert (families[name].type, own or "-") == (kind, labels), name
        else:
            assert state.startswith("needs: ")
            assert name not in families, f"{name} exists now: write 'here' behind it in {VLLM_NAMES.name}"


def test_the_documentation_lists_what_the_registry_has(page: str) -> None:
    assert metrics_table.main(["--check"]) == 0, "run python docs/metrics_table.py"
    documented = {family.name for family in metrics_table.families()}
    on_a_gpu = {name for name in documented if name.startswith("quire:gpu_")}
    assert len(on_a_gpu) == 5
    of_states = {name for name in documented if name.startswith("quire:state_")}
    assert len(of_states) == 2
    of_the_host = {
        name for name in documented if "kv_offload" in name or "external_prefix" in name or "kv_disk" in name
    }
    assert len(of_the_host) == 8
    of_images = {name for name in documented if name.startswith("vllm:mm_cache_")}
    assert len(of_images) == 2
    assert documented - on_a_gpu - of_states - of_the_host - of_images == {
        f.name for f in text_string_to_metric_families(page)
    }


def test_queries_of_the_documentation_name_what_there_is(page: str) -> None:
    series = {
        f.name + suffix for f in text_string_to_metric_families(page) for suffix in TYPES[f.type]
    }  # fmt: skip
    queries = "\n".join(re.findall(r"```promql\n(.*?)```", DOCS.read_text(), re.S))
    asked = set(re.findall(r"\b(?:vllm:|quire:|http_)\w+", queries))
    assert len(asked) > 8
    assert asked <= series


def test_a_scraper_that_looks_for_a_name_anywhere_in_a_line_finds_its_number(page: str) -> None:
    """As the guides do it: the last line that has the name in it counts."""
    wanted = ("vllm:gpu_cache_usage_perc", "vllm:num_requests_waiting", "vllm:cpu_prefix_cache_hit_rate")
    last = {}
    for line in page.splitlines():
        for name in wanted:
            if name in line and not line.startswith("#"):
                last[name] = line
    assert {name: line.partition("{")[0] for name, line in last.items()} == {name: name for name in wanted}
    assert all(0 <= float(line.split()[-1]) <= 1 for line in last.values())
