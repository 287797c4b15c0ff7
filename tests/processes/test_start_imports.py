"""A server is ready in two seconds because its processes import only what they use: what each must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ENGINE = """
from quire.runtime.executor.early_loading import begin_loading
begin_loading(meta_kernels=False)
import quire.engine.process, quire.runtime.worker.worker
"""
_CASES = {
    "before the engine begins": (
        "import quire.cli.main, quire.cli.early_engine",
        "msgspec quire.foundation.config quire.models numpy asyncio importlib.metadata logging",
    ),
    "supervisor": (
        "import quire.cli.early_engine, quire.cli.serve",
        "torch transformers numpy fastapi pydantic tokenizers jinja2 asyncio ray quire.runtime.executor.nodes "
        "quire.runtime.executor.ray_nodes quire.models.layers quire.text",
    ),
    "api": (
        "import quire.serving.api_server",
        "torch transformers PIL quire.models.layers quire.models.layer_spec quire.models.families quire.offline "
        "opentelemetry.sdk opentelemetry.exporter opentelemetry.proto grpc google.protobuf",
    ),
    "engine": (
        _ENGINE,
        "torch._decomp torch._refs torch._prims torch._dynamo torch._inductor sympy onnx triton transformers "
        "fastapi pydantic tokenizers jinja2 uvicorn",
    ),
}
"""By process: its imports, and what they leave out."""


@pytest.mark.parametrize("process", _CASES)
def test_a_process_imports_nothing_that_it_does_not_use(process: str) -> None:
    imports, left_out = _CASES[process]
    names = tuple(left_out.split())
    code = f"{imports}\nimport sys\nprint(*(name for name in {names} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
