"""Rules of SECURITY.md that hold for the source as a whole, and that every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_repository import MODULES, ROOT, name_of, parsed

NAMED = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())
MAY_EXEC = {"quire/compute/kernels/triton/launching/launch.py"}  # of its own source


@pytest.mark.parametrize(("path", "test"), sorted(set(NAMED)))
def test_the_tests_that_the_table_names_exist(path: str, test: str) -> None:
    functions = {
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert test in functions


def test_the_table_names_tests() -> None:
    assert len(NAMED) >= 20


def test_the_versions_that_were_reviewed_are_those_that_are_pinned() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("version reviewed")[2]
    packages = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    reviewed = set(re.findall(r"(\S+) (\d[\d.]*)", " ".join(packages)))
    pinned = set(re.findall(r"^([^=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert len(reviewed) >= 12
    assert reviewed <= pinned


def calls(path: Path) -> set[str]:
    """Names of what a module calls: `eval`, `importlib.import_module`."""
    return {ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}


def test_no_code_comes_from_models_or_requests() -> None:
    """Nothing is evaluated or compiled; modules are imported by name from registries of our own and from flags."""
    called = {module: calls(module) for module in MODULES}
    found = {name_of(module) for module in MODULES if {"eval", "exec", "compile", "__import__"} & called[module]}
    assert found <= MAY_EXEC
    loaders = {"importlib.util.spec_from_file_location", "runpy.run_path", "importlib.machinery.SourceFileLoader"}
    assert [name_of(module) for module in MODULES if loaders & called[module]] == []
    readers = {"auto_map", "trust_remote_code"}
    mentioned = {name_of(m) for m in MODULES if readers & set(re.findall(r"\w+", m.read_text()))}
    # Where the flag is refused, a model that needs such code, and processors that are told to load none.
    processors = "quire/models/fallback/image_processor.py"
    assert mentioned <= {"quire/foundation/config/vllm_compat.py", "quire/models/fallback/classes.py", processors}
    told = [line.strip() for line in (ROOT / processors).read_text().splitlines() if "trust_remote_code" in line]
    assert told
    assert all(re.search(r"trust_remote_code\"?[=:] ?False", line) for line in told)


def test_keys_are_compared_as_digests_in_constant_time() -> None:
    head = ROOT / "quire/serving/api/auth.py"
    assert {"hmac.compare_digest", "find_digest"} <= set(calls(head))
    compared = {ast.unparse(node) for node in ast.walk(parsed(head)) if isinstance(node, ast.Compare)}
    assert not [text for text in compared if "==" in text and ("key" in text or "digest" in text)]


def test_internal_sockets_lie_in_directories_of_their_owner() -> None:
    """All addresses of ZMQ are ipc; their directories are made by mkdtemp, which lets only their owner in."""
    texts = {name_of(module): module.read_text() for module in MODULES}
    users = {name for name, text in texts.items() if re.search(r"^import zmq", text, re.MULTILINE)}
    assert users == {"quire/engine/client.py"}
    assert set(re.findall(r'f"(\w+)://', texts["quire/engine/client.py"])) == {"ipc"}
    makers = {"quire/serving/supervisor/engine_process.py", "quire/serving/supervisor/supervisor.py"}
    assert all("tempfile.mkdtemp(" in texts[name] for name in makers)
