"""LlamaIndex's OpenAI-like model: completion, chat, both streamed, and a tool."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

url, key = sys.argv[1:]
options = {"model": "quill", "api_base": url + "/v1", "api_key": key, "temperature": 0, "max_retries": 0}
model = OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=2048, **options)
completing = OpenAILike(is_chat_model=False, context_window=2048, max_tokens=8, **options)


def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return city


question = [ChatMessage(role="user", content="What is 12 + 30?")]
tool = FunctionTool.from_defaults(get_weather)
called = model.chat_with_tools([tool], user_msg="What is the weather in Oslo?")
calls = model.get_tool_calls_from_response(called)
print(
    json.dumps(
        {
            "chat": model.chat(question).message.content,
            "streamed": "".join(part.delta or "" for part in model.stream_chat(question)),
            "completed": completing.complete("The sun is").text,
            "calls": [[call.tool_name, call.tool_kwargs] for call in calls],
        }
    )
)
