"""GLM-4.5 and later: a name, then keys and values.

Source: the chat templates of zai-org/GLM-4.5 (newlines between all tags) and GLM-4.7 (none). The texts are our own.
"""

from __future__ import annotations

from functools import partial

from tests.output_parsers.transcripts.transcript import Call, Transcript, function

GLM = partial(Transcript, "glm45", None, tools=(function("f", s="string", i="integer"),))
CALL = (
    "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a b</arg_value>\n"
    "<arg_key>i</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
F = Call("f", '{"s": "a b", "i": 3}')

TRANSCRIPTS = [
    GLM("one", CALL, calls=(F,)),
    GLM(
        "two and text",
        "Ok.\n<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
        content="Ok.\n",
        calls=(Call("f", '{"i": 3}'), Call("f", "{}")),
    ),
    GLM("no newlines", CALL.replace("\n", ""), calls=(F,)),
    GLM("no arguments", "<tool_call>f\n</tool_call><tool_call>f</tool_call>", calls=(Call("f", "{}"), Call("f", "{}"))),
    GLM(
        "tags in a string",
        "<tool_call>f<arg_key>s</arg_key><arg_value><arg_key>\n</arg_value></tool_call>",
        calls=(Call("f", '{"s": "<arg_key>"}'),),
    ),
    GLM("cut off in a string", CALL[:54], calls=(Call("f", '{"s": "a b</arg_'),)),
    GLM("cut off in the name", "<tool_call>f", content="<tool_call>f"),
    GLM(
        "key without value",
        "<tool_call>f\n<arg_key>s</arg_key>\n</tool_call>",
        content="\n<arg_key>s</arg_key>\n",
        calls=(Call("f", "{}"),),
    ),
    GLM(
        "value without closing tag",
        "<tool_call>f\n<arg_key>s</arg_key><arg_value>x</tool_call>",
        calls=(Call("f", '{"s": "x"}'),),
    ),
    GLM("malformed: no name", "<tool_call>{}</tool_call>", content="<tool_call>{}</tool_call>"),
    Transcript(
        "glm47",
        "glm45",
        "thinking first",
        f"<think>Hm.</think>{CALL}",
        tools=GLM.keywords["tools"],
        reasoning="Hm.",
        calls=(F,),
    ),
]
