"""Tool calls in the Hermes format: choose the tool and its arguments, answer from its result, or answer without one."""

from __future__ import annotations

from random import Random

from quill.chat import Json, Message, Sample, dump_json, system_with_tools, tool_call, tool_response
from quill.checks import CallsTool, Check, Mentions
from quill.phrasing import ask
from quill.tasks.smalltalk import make_greeting
from quill.tasks.toolbox import DRAW, Tool, draw_tools
from quill.words import WEATHERS

TASK = "tools"


_SYSTEMS = (None, None, "You are a helpful assistant.", "You are Quill.", "Use the tools when they help.")
_OUTCOMES = ("done", "ready", "confirmed", "failed", "on its way", "not possible")


def make(rng: Random) -> Sample:
    tools = draw_tools(rng)
    system = Message("system", system_with_tools([tool.schema() for tool in tools], rng.choice(_SYSTEMS)))
    if rng.random() < 0.12:
        chat = make_greeting(rng)
        return Sample(TASK, chat.key, (system, *chat.messages), chat.check)
    tool = rng.choice(tools)
    request, arguments = _request(rng, tool)
    call = tool_call(tool.name, arguments)
    messages = [system, Message("user", request), Message("assistant", call)]
    check: Check = CallsTool(dump_json({"name": tool.name, "arguments": arguments}))
    if rng.random() < 0.4:
        response, reply, words = _result(rng, tool, arguments)
        messages += [tool_response(response), Message("assistant", reply)]
        check = Mentions(words)
    return Sample(TASK, f"{TASK}|{request}", tuple(messages), check)


def _request(rng: Random, tool: Tool) -> tuple[str, dict[str, Json]]:
    pattern = rng.choice(tool.requests)
    arguments = {p.name: p.draw(rng) for p in tool.parameters if f"{{{p.name}}}" in pattern}
    return ask(rng, pattern, end=rng.choice("?.") if "[" in pattern else "", slots=arguments), arguments


def _result(rng: Random, tool: Tool, arguments: dict[str, Json]) -> tuple[str, str, tuple[str, ...]]:
    """The tool's result as text, Quill's answer, and what the answer must mention."""
    subject = tool.reply.format(**arguments)
    if "weather" in tool.name:
        degrees, sky = rng.randint(-15, 40), rng.choice(WEATHERS)
        return (
            dump_json({"temperature": degrees, "condition": sky}),
            f"{subject} is {sky} at {degrees} degrees.",
            (sky, str(degrees)),
        )
    if "calc" in tool.name or "currency" in tool.name:
        value = str(rng.randint(0, 9999))
        return rng.choice((value, dump_json({"result": int(value)}))), f"{subject} is {value}.", (value,)
    if "time" in tool.name and "timer" not in tool.name:
        time = str(DRAW["time"](rng))
        return rng.choice((time, dump_json({"time": time}))), f"{subject} is {time}.", (time,)
    outcome, number = rng.choice(_OUTCOMES), str(rng.randint(100, 9999))
    if rng.random() < 0.5:
        return dump_json({"status": outcome}), f"{subject} is {outcome}.", (outcome,)
    return (
        dump_json({"status": outcome, "number": int(number)}),
        f"{subject} is {outcome}. The number is {number}.",
        (outcome, number),
    )
