"""The house rules that a linter cannot see: what may be imported where, how files are named, what documents promise."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import quire
from quire.foundation.config import Config

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "quire").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=name_of(path))


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of everything that is imported, also inside functions: `from a import b` gives `a.b`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def attributes(tree: ast.AST) -> set[str]:
    """`module.name` of every access to an attribute of a plain name."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def tracked_files() -> list[Path]:
    """What is committed, or staged to be."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for line in listing.stdout.splitlines() if (path := ROOT / line).is_file()]


# --- files ----------------------------------------------------------------------------------------------------------


def test_no_file_is_named_after_nothing() -> None:
    empty_names = {"util", "utils", "common", "helper", "helpers", "misc", "base"}
    assert [name_of(m) for m in MODULES if empty_names & {m.stem, m.parent.name}] == []


def test_every_module_says_what_it_owns() -> None:
    """A package marker may be empty; whatever holds code has a docstring."""
    assert [name_of(m) for m in MODULES if m.read_text().strip() and not ast.get_docstring(parsed(m))] == []


# --- imports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "quire",
        "quire.cli.main",
        "quire.serving.supervisor.supervisor",
        "quire.serving.app",
        "quire.engine.client",
        "quire.text.tokenizer",
    ],
)
def test_import_loads_no_tensor_library(module: str) -> None:
    """Measured, because import-linter sees neither imports by name nor those of third parties."""
    heavy = ["torch", "transformers", "xgrammar", "triton"]
    code = f"import sys, {module}; print(*(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize(
    "room",
    [
        "engine/structured_output", "models/layers", "models/lora", "models/quantization", "models/weights",
        "planning/costmodel", "text/output_parsers",
    ],
)  # fmt: skip
def test_a_room_imports_no_file_of_the_part_around_it(room: str) -> None:
    """Beside the import-linter contracts, which know such a part's rooms, and not all its files. Layers may be built
    from the plain data that describes them."""
    folder = ROOT / "quire" / room
    files = {f"quire.{folder.parent.name}.{file.stem}" for file in folder.parent.glob("[!_]*.py")}
    names = ("layer_spec", "recurrent_spec", "state_space_spec", "text_head_spec", "sentence_files")
    data = {f"quire.models.{name}" for name in names}
    files -= data if room == "models/layers" else set()
    modules = sorted(folder.rglob("*.py"))
    assert files
    assert modules
    for module in modules:
        imported = imports(parsed(module))
        assert not files & (imported | {name.rpartition(".")[0] for name in imported}), name_of(module)


def test_nothing_is_pickled() -> None:
    """Beside the import-linter contract: what pickles without importing pickle by name."""
    for module in MODULES:
        tree = parsed(module)
        assert not {"torch.load", "torch.save"} & attributes(tree), name_of(module)
        # Processes, queues and pools of multiprocessing pickle their arguments; its shared memory does not.
        used = [name for name in imports(tree) if name.split(".")[0] == "multiprocessing"]
        assert all(name.startswith("multiprocessing.shared_memory") for name in used), name_of(module)


def test_only_one_module_reads_the_environment() -> None:
    readers = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv"}
    found = {name_of(m) for m in MODULES if readers & (imports(tree := parsed(m)) | attributes(tree))}
    assert found == {"quire/foundation/config/environment.py"}


# --- settings -------------------------------------------------------------------------------------------------------


def test_field_names_are_unique_over_all_config_parts() -> None:
    """Flags and `LLM`'s arguments are flat."""
    names = Counter(f.name for part in fields(Config) for f in fields(getattr(Config(), part.name)))
    assert [name for name, count in names.items() if count > 1] == []


CONFIG_PARTS = [type(getattr(Config(), part.name)) for part in fields(Config)]


@pytest.mark.parametrize("part", CONFIG_PARTS)
def test_every_setting_is_described(part: type) -> None:
    """The string below a field is its help on the command line and in the documentation."""
    (cls,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(cls, ast.ClassDef)
    for field, after in pairwise([*cls.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert described, f"{part.__name__}.{ast.unparse(field.target)} has no docstring"


# --- packaging ------------------------------------------------------------------------------------------------------


def test_version_is_said_once() -> None:
    assert PROJECT["version"] == quire.__version__


def test_every_dependency_is_pinned_within_its_range() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    extras = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    for text in [*PROJECT["dependencies"], *extras]:
        wanted = Requirement(text)
        if wanted.name not in ("torch", "triton"):  # the Makefile chooses torch's build, and a GPU build its Triton
            assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), text


def test_no_package_registry_is_named() -> None:
    """Where packages come from is the installing machine's choice, but for PyTorch's index of CPU wheels."""
    words = "pypi|pythonhosted|conda|npmjs|artifactory|jfrog|nexus|registry|mirror|devpi|download.pytorch"
    registry = re.compile(rf"https?://[\w.-]*(?:{words})[^\s\"')]*|https?://[^\s\"')]*/simple\b", re.IGNORECASE)
    found = {
        (name_of(path), match)
        for path in tracked_files()
        if path.suffix not in (".safetensors", ".png") and path != Path(__file__)
        for match in registry.findall(path.read_text(errors="replace"))
    }
    assert found == {("Makefile", "https://download.pytorch.org/whl/cpu")}


# --- documents ------------------------------------------------------------------------------------------------------

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_documents_name_make_targets_that_exist(document: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", document.read_text(), re.MULTILINE))
    assert named <= known
