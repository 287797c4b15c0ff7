"""Llama 3: JSON objects without tags.

Sources: models/llama3_1/prompt_format.md and llama3_2/text_prompt_format.md in meta-llama/llama-models; vLLM's
documentation and tests of llama3_json (semicolons, <|python_tag|>). The texts are our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript, function

Llama = partial(Transcript, "llama3_json", None, tools=(function("f", a="integer"), function("g")))
F = Call("f", '{"a": 1}')
G = Call("g", "{}")
CALL_F = '{"name": "f", "parameters": {"a": 1}}'
CALL_G = '{"name": "g", "parameters": {}}'

TRANSCRIPTS = [
    Llama("one", CALL_F, calls=(F,)),
    Llama("behind the tag", f"<|python_tag|>{CALL_F}", calls=(F,)),
    Llama("semicolons", f"{CALL_F}; {CALL_G};{CALL_F}", calls=(F, G, F)),
    Llama("lines", f"Two calls:\n{CALL_F}\n{CALL_G}\nDone.", content="Two calls:\n\nDone.", calls=(F, G)),
    Llama("type and arguments", '{"type": "function", "name": "f", "arguments": {"a": 1}}', calls=(F,)),
    Llama("not in the line", f"Try {CALL_F}", content=f"Try {CALL_F}"),
    Llama("an answer in JSON", '{"name": "Ann", "age": 5}', content='{"name": "Ann", "age": 5}'),
    Llama("a call in JSON", f'{{"call": {CALL_F}}}', content=f'{{"call": {CALL_F}}}'),
    Llama("another function", CALL_F.replace("f", "h"), content=CALL_F.replace("f", "h")),
    Llama("text", "Hello,\n\n  world\n", content="Hello,\n\n  world\n"),
    Llama("cut off in the name", '{"name": "f', content='{"name": "f'),
    Llama("cut off in the arguments", CALL_F[:-4], calls=(Call("f", '{"a":'),)),
    Llama(
        "built-in tool",
        '<|python_tag|>brave_search.call(query="x")',
        content='<|python_tag|>brave_search.call(query="x")',
    ),
    Transcript("llama4_json", None, "no tools known", CALL_F, calls=(F,)),
]
