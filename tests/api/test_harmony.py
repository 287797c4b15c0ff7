"""Chat with gpt-oss over HTTP: channels of harmony become reasoning, content and calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.build import build_model_runtime_info
from quire.engine.inprocess import InProcessClient
from quire.foundation.clock import SystemClock
from quire.foundation.config import Config
from quire.planning.auto_config import resolve
from quire.runtime.executor.factory import build_executor
from quire.text.output_parsers.harmony import SPECIAL_TOKENS
from tests.api.server import Server, running
from tests.api.speaker import Speaker, make_special, speaking
from tests.api.test_tools import WEATHER
from tests.checkpoints import make_tiny, write_tokenizer
from tests.models_sweep.rows import ROWS

TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|># Tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""In the manner of gpt-oss's."""
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
ANALYSIS = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Speaker]]:
    """Parsers are chosen by the template."""
    with speaking(tmp_path_factory.mktemp("model"), TEMPLATE, special_tokens=SPECIAL_TOKENS) as both:
        yield both


def said(server: Server, **fields: Any) -> dict[str, Any]:
    """The message and its finish reason, the same whole and streamed."""
    body = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    whole = {
        "reasoning": message.get("reasoning") or "", "content": message["content"] or "", "calls": calls,
        "finish": choice["finish_reason"],
    }  # fmt: skip
    streamed: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None}
    lines = server.post("/v1/chat/completions", body | {"stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    for line in lines[:-2]:
        for chunk in json.loads(line.removeprefix("data: "))["choices"]:
            delta = chunk["delta"]
            streamed["reasoning"] += delta.get("reasoning") or ""
            streamed["content"] += delta.get("content") or ""
            streamed["finish"] = chunk["finish_reason"] or streamed["finish"]
            for call in delta.get("tool_calls") or []:
                name, arguments = call["function"].get("name"), call["function"].get("arguments") or ""
                if name:
                    streamed["calls"].append((name, arguments))
                else:
                    streamed["calls"][-1] = (streamed["calls"][-1][0], streamed["calls"][-1][1] + arguments)
    assert streamed == whole
    return whole


def test_channels_are_reasoning_and_content(both: tuple[Server, Speaker]) -> None:
    server, speaker = both
    speaker.text = f"{ANALYSIS}{FINAL}Cold."
    assert said(server) == {"reasoning": "Let me see.", "content": "Cold.", "calls": [], "finish": "stop"}


def test_a_message_to_a_function_is_a_call(both: tuple[Server, Speaker]) -> None:
    server, speaker = both
    speaker.text = f"{ANALYSIS}{CALL}"
    found = said(server, tools=[WEATHER])
    assert (found["reasoning"], found["content"], found["finish"]) == ("Let me see.", "", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == [("get_weather", {"city": "Oslo"})]


def test_whatever_a_tiny_gpt_oss_says_is_an_answer(tmp_path: Path) -> None:
    """Its weights are random, so that it says tags of harmony in any order."""
    make_tiny(tmp_path, "GptOssForCausalLM", hidden_size=64, num_attention_heads=4, **ROWS["GptOssForCausalLM"])
    write_tokenizer(tmp_path)
    make_special(tmp_path / "tokenizer.json", SPECIAL_TOKENS)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    found = resolve(Config().with_values(model=str(tmp_path), max_model_len=512, **settings))

    def engine() -> InProcessClient:
        clock = SystemClock()
        info = build_model_runtime_info(found.config, found.spec)
        return InProcessClient(found.config, build_executor(found.config, clock), clock, info)

    bias = {str(token): 4.0 for token in range(313, 320)}  # of tags
    with running(tmp_path, client=engine) as server:
        for seed in range(2):
            answer = said(server, tools=[WEATHER], max_tokens=40, temperature=1, seed=seed, logit_bias=bias)
            assert answer["finish"] in ("stop", "length", "tool_calls")
