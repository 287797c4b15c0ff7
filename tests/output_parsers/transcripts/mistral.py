"""Mistral: a list behind [TOOL_CALLS], or names with arguments each.

Sources: mistral-common's instruct tokenizers (V3 and V7: a list; V11: [CALL_ID] and [ARGS]; V13: [ARGS]) and its
validator of ids; the model card of mistralai/Magistral-Small-2509. The texts are our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript

Mistral = partial(Transcript, "mistral", None)
NEW_ID = "[a-zA-Z0-9]{9}"
F = Call("f", '{"a": 1}', NEW_ID)
G = Call("g", "{}", NEW_ID)

TRANSCRIPTS = [
    Mistral(
        "list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', calls=(F, G)
    ),
    Mistral("arguments first", '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', calls=(F,)),
    Mistral("an object alone", 'So: [TOOL_CALLS]{"name": "g", "arguments": {}}', content="So: ", calls=(G,)),
    Mistral("names", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', calls=(F, G)),
    Mistral("names and arguments", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', calls=(F, G)),
    Mistral("ids", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', calls=(Call("f", '{"a": 1}', "abc123XYZ"),)),
    Mistral("an id that is none", '[TOOL_CALLS]f[CALL_ID]x[ARGS]{"a": 1}', calls=(F,)),
    Mistral(
        "cut off in the list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": ', calls=(Call("f", '{"a": ', NEW_ID),)
    ),
    Mistral("cut off in the name", "[TOOL_CALLS]f[AR", content="[TOOL_CALLS]f[AR"),
    Mistral(
        "cut off in the arguments",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]',
        calls=(Call("f", '{"a": "[TOOL_CALLS]', NEW_ID),),
    ),
    Mistral("no call", "[TOOL_CALLS]what now?", content="[TOOL_CALLS]what now?"),
    Mistral("no arguments", "[TOOL_CALLS]f[ARGS]1[TOOL_CALLS]g{}", content="[TOOL_CALLS]f[ARGS]1", calls=(G,)),
    Mistral("brackets", "a[0] and [TOOL", content="a[0] and [TOOL"),
    Transcript(
        "mistral",
        "mistral",
        "thinking first",
        "[THINK]hm[/THINK]I look.[TOOL_CALLS]g[ARGS]{}",
        reasoning="hm",
        content="I look.",
        calls=(G,),
    ),
]
