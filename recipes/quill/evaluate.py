"""Scores a running OpenAI-compatible server on the held-out questions, greedily, and prints a table by task.

    python recipes/quill/evaluate.py --base-url http://127.0.0.1:8000/v1

Needs httpx alone. Where a question needs tools they stand in its system message, as the chat template would write them;
with --tools they are sent as `tools`, and the answer's `tool_calls` are graded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from quill.chat import Sample
from quill.examination import MAX_ANSWER_TOKENS, QUESTIONS, examination, grade
from quill.tasks import EXAMINED
from quill.toolchat import answer_text, calls_are_valid, request_with_tools

Request = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True)
class Server:
    base_url: str
    model: str | None
    api_key: str
    concurrency: int
    timeout: float

    async def answer_all(self, requests: Sequence[Request]) -> list[Message]:
        """One message per request, in their order. Raises httpx.HTTPError if the server fails."""
        limits = httpx.Limits(max_connections=self.concurrency)
        headers = {"Authorization": f"Bearer {self.api_key}"}
        # The slash makes relative paths go below the base.
        base = self.base_url.rstrip("/") + "/"
        async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=self.timeout) as client:
            model = self.model or await _first_model(client)
            turns = asyncio.Semaphore(self.concurrency)
            return await asyncio.gather(*(_answer(client, model, turns, request) for request in requests))


async def _first_model(client: httpx.AsyncClient) -> str:
    response = await client.get("models")
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


async def _answer(client: httpx.AsyncClient, model: str, turns: asyncio.Semaphore, request: Request) -> Message:
    body = {"model": model, "temperature": 0, "max_tokens": MAX_ANSWER_TOKENS, **request}
    async with turns:
        response = await client.post("chat/completions", json=body)
    response.raise_for_status()
    message: Message = response.json()["choices"][0]["message"]
    return message


def _request(sample: Sample, options: argparse.Namespace) -> Request:
    if options.tools:
        return request_with_tools(sample.question, strict=options.strict)
    return {"messages": [{"role": message.role, "content": message.content} for message in sample.question]}


def main() -> int:
    options = _options()
    server = Server(options.base_url, options.model, options.api_key, options.concurrency, options.timeout)
    samples = [sample for sample in examination(options.questions) if options.task in (None, sample.task)]
    requests = [_request(sample, options) for sample in samples]
    started = time.monotonic()
    try:
        messages = asyncio.run(server.answer_all(requests))
    except httpx.HTTPError as error:
        print(f"{options.base_url} did not answer: {error!r}", file=sys.stderr)
        return 1
    answers = [answer_text(message) if options.tools else str(message["content"] or "") for message in messages]
    report = grade(samples, answers)
    print(f"{report.table()}\n{len(samples)} questions in {time.monotonic() - started:.1f} s")
    if options.tools:
        valid = [
            calls_are_valid(message, request["tools"])
            for message, request in zip(messages, requests, strict=True)
            if "tools" in request
        ]
        print(f"{sum(valid)} of {len(valid)} answers to questions with tools have no call or valid calls")
    if options.json:
        wrong = [
            {"task": samples[i].task, "asked": samples[i].question[-1].content, "said": answers[i]}
            for i in report.wrong
        ]
        result = {"scores": report.as_json(), "wrong": wrong}
        options.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Scores a server on Quill's held-out questions.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="of the server, with /v1")
    parser.add_argument("--model", help="model name (default: the first that the server lists)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way at a time (default 16)")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="how many (default 1000)")
    parser.add_argument("--task", choices=EXAMINED, help="ask the questions of this task only")
    parser.add_argument("--tools", action="store_true", help="send tools as tools, and grade tool_calls")
    parser.add_argument("--strict", action="store_true", help="with --tools: make every function strict")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for one answer (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write scores and wrong answers here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
