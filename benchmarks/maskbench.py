"""Real schemas against structured output: MaskBench's instances, and JSONSchemaBench's schemas on a server.

    git clone https://github.com/guidance-ai/jsonschemabench
    python -m benchmarks.maskbench instances jsonschemabench/maskbench/data --sample 2000
    quire serve &
    python -m benchmarks.maskbench server jsonschemabench/data http://127.0.0.1:8000

`instances` holds each instance of a schema against the grammar that Quire makes of it, and against the check of the
finished value where the grammar does not enforce everything: an invalid one that passes both is a fault, unless the
check of the whole schema says that only a format is at fault that JSON Schema does not have. `server` asks
for 60 schemas of each data set without `strict`; an answer that ends with `stop` and is not valid, or a 5xx, is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
from llguidance import LLMatcher, LLTokenizer

from quire.engine.structured_output.checker import GrammarChecker
from quire.engine.structured_output.finished_value import problem_of
from quire.engine.structured_output.grammars import PARSER_LIMITS
from quire.engine.structured_output.messages import FinishedValue, Verdict
from quire.errors import RequestError
from quire.foundation.http_client.http1 import HttpError
from quire.structured_outputs_params import StructuredOutputsParams
from quire.tools.bench.client import Connections

PER_SET = 60
MAX_TOKENS = 300
CLIENTS = 16
CONNECT_S = 10.0


def instances(directory: Path, sample: int) -> Counter[str]:
    """What becomes of the instances of so many schemas: outcomes, and how often each came. Faults are shown."""
    files = sorted(directory.glob("*.json"))
    chosen = sorted(random.Random(0).sample(files, min(sample, len(files))))
    checker, tokenizer, found = GrammarChecker(), LLTokenizer("byte"), Counter[str]()
    try:
        for file in chosen:
            case = json.loads(file.read_text())
            schema = case.get("schema")
            verdict = _verdict(checker, schema)
            found["schemas" if verdict else "schemas refused"] += 1
            if verdict is not None:
                matcher = LLMatcher(tokenizer, verdict.grammar, limits=PARSER_LIMITS, log_level=0)
                for number, test in enumerate(case.get("tests", ())):
                    passes = _passes(matcher, verdict, schema, test["data"])
                    kind = "valid" if test["valid"] else "invalid"
                    if passes and not test["valid"] and not problem_of(_finished(schema, test["data"])):
                        kind = "invalid by a format that is an annotation"
                    outcome = f"{kind}, {'passes' if passes else 'does not'}"
                    found[outcome] += 1
                    if passes != test["valid"]:
                        print(f"{file.name} [{number}]: {outcome}")
    finally:
        checker.close()
    return found


def _verdict(checker: GrammarChecker, schema: Any) -> Verdict | None:
    if not isinstance(schema, dict | bool):
        return None
    try:
        return checker.check(StructuredOutputsParams(json=json.dumps(schema), strict=False))
    except RequestError:
        return None


def _passes(matcher: LLMatcher, verdict: Verdict, schema: Any, value: Any) -> bool:
    text = json.dumps(_in_order(value, schema), separators=(",", ":"), ensure_ascii=False)
    tokens, following = list(text.encode()), matcher.deep_copy()
    if following.try_consume_tokens(tokens) < len(tokens) or not following.is_accepting():
        return False
    return not verdict.lenient or not problem_of(FinishedValue(json.dumps(schema), text))


def _finished(schema: Any, value: Any) -> FinishedValue:
    return FinishedValue(json.dumps(schema), json.dumps(value))


def _in_order(value: Any, schema: Any) -> Any:
    """The value with its properties in the order in which the schema lists them, where it does so itself."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [_in_order(each, items) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") if isinstance(schema, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    names = [*(name for name in properties if name in value), *(name for name in value if name not in properties)]
    return {name: _in_order(value[name], properties.get(name)) for name in names}


async def server(directory: Path, url: str) -> Counter[str]:
    """What a server makes of PER_SET schemas of each data set. Faults are shown."""
    found: Counter[str] = Counter()
    waiting = _sample(directory)
    async with Connections(url, CONNECT_S, {}) as connections:

        async def client() -> None:
            for file, schema in waiting:
                outcome = await _outcome(connections, schema)
                found[outcome] += 1
                if "refused" in outcome or "fault" in outcome:
                    print(f"{file.parent.name}/{file.name}: {outcome}")

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


def _sample(directory: Path) -> Iterator[tuple[Path, Any]]:
    for data_set in sorted(path for path in directory.iterdir() if path.is_dir()):
        files = sorted(data_set.glob("*.json"))
        for file in random.Random(0).sample(files, min(PER_SET, len(files))):
            yield file, json.loads(file.read_text())


async def _outcome(connections: Connections, schema: Any) -> str:
    ask = [{"role": "user", "content": f"JSON of this schema: {json.dumps(schema)[:200]}"}]
    form = {"type": "json_schema", "json_schema": {"name": "sample", "schema": schema}}
    body = {"messages": ask, "response_format": form, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 0}
    received = bytearray()
    try:
        status = await connections.post("/v1/chat/completions", msgspec.json.encode(body), received.extend)
    except HttpError as error:
        return f"fault: {error}"
    answer = json.loads(bytes(received))
    if status >= 400:
        message = answer["error"]["message"][:160]
        if answer["error"]["code"] == "schema_mismatch":
            return "accepted, and found invalid"
        return f"{'fault' if status >= 500 else 'refused'} {status}: {message}"
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        return "accepted, and cut off"
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        error = next(kind(schema).iter_errors(json.loads(choice["message"]["content"])), None)
    except Exception as problem:  # a schema that the package cannot read
        return f"accepted, and not to be judged: {type(problem).__name__}"
    return "accepted, and valid" if error is None else f"fault: invalid, {error.message[:160]}"


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_instances = commands.add_parser("instances")
    of_instances.add_argument("directory", type=Path)
    of_instances.add_argument("--sample", type=int, default=2_000, help="schemas")
    of_server = commands.add_parser("server")
    of_server.add_argument("directory", type=Path)
    of_server.add_argument("url")
    arguments = vars(parser.parse_args())
    logging.disable(logging.WARNING)  # each schema says what is not enforced
    if arguments.pop("command") == "instances":
        found = instances(**arguments)
    else:
        found = asyncio.run(server(**arguments))
    for outcome, count in found.most_common():
        print(f"{count:7,d} {outcome}")


if __name__ == "__main__":
    main()
