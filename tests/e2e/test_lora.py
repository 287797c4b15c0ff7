"""The commands of docs/lora.md, typed as they stand, and that what was loaded outlives the processes that knew it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import make_llama
from tests.e2e.serve import QuireServe

pytestmark = pytest.mark.long("api")

DOCS = Path(__file__).parents[2] / "docs" / "lora.md"
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL) for line in block.splitlines()
]
KEY = "KEY"
"""As the page has it."""


def write_adapter(directory: Path, seed: int) -> None:
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        at = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        tensors[f"{at}.lora_A.weight"] = torch.randn(4, 112, generator=generator)
        tensors[f"{at}.lora_B.weight"] = torch.randn(64, 4, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))


def curl(command: str, url: str, **replaced: str) -> httpx.Response:
    """What curl would be answered; greedily, and some values of the JSON are others."""
    words = shlex.split(command)
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    headers.setdefault("Authorization", f"Bearer {KEY}")
    path = words[1].partition("/")[2]
    body = json.loads(words[words.index("-d") + 1]) | replaced
    if path == "v1/completions":
        body["temperature"] = 0
    return httpx.post(f"{url}/{path}", json=body, headers=headers, timeout=60)


def said(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def answers_again(server: QuireServe, model: str) -> Any:
    """What it says once it serves again."""
    for _ in range(1_800):
        try:
            return said(curl(COMMANDS[1], server.url, model=model))
        except (AssertionError, httpx.HTTPError):
            time.sleep(0.1)
    raise AssertionError("it does not serve again")


@pytest.mark.parametrize("ranks", [(), ("--tensor-parallel-size", "2")], ids=["one rank", "two ranks"])
def test_the_pages_commands_work_and_adapters_outlive_engine_and_api_process(
    tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    model = make_llama(tmp_path / "model")
    for seed, name in enumerate(("poet", "lawyer", "late")):
        write_adapter(tmp_path / name, seed)
    serve, complete, load, unload = COMMANDS
    words = [word.replace("./", f"{tmp_path}/").replace("quill", str(model)) for word in shlex.split(serve)[2:]]
    settings = ("--port", "0", "--max-model-len", "256", "--dtype", "float32", "--api-key", KEY, *ranks)
    with QuireServe(*words, *settings) as server:
        server.wait_ready()
        base, poet, lawyer = (said(curl(complete, server.url, model=name)) for name in (str(model), "poet", "lawyer"))
        assert len({base, poet, lawyer}) == 3
        taken = curl(load, server.url)
        assert (taken.status_code, "load_inplace" in taken.text) == (400, True)
        loaded = curl(load, server.url, lora_name="late", lora_path=str(tmp_path / "late"))
        assert loaded.status_code == 200, loaded.text
        late = said(curl(complete, server.url, model="late"))
        assert late not in (base, poet, lawyer)
        for kind in ("engine",) if ranks else ("engine", "api"):
            os.kill(server.children()[kind], signal.SIGKILL)
            assert answers_again(server, "late") == late
            assert answers_again(server, "poet") == poet
            assert answers_again(server, str(model)) == base
        assert curl(unload, server.url).status_code == 200
        assert curl(complete, server.url).status_code == 404
        shutil.rmtree(tmp_path / "poet")
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert answers_again(server, "lawyer") == lawyer  # a module of the start that is gone ends no later start
        server.signal()
        assert server.wait() == 0
