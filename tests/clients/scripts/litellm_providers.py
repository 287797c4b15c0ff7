"""LiteLLM: the same question through four of its providers, whole and streamed, and a tool."""

import json
import sys

import litellm

url, key = sys.argv[1:]
litellm.num_retries = 0
question = [{"role": "user", "content": "What is 12 + 30?"}]
weather = [{"role": "user", "content": "What is the weather in Oslo?"}]
tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
bases = {"openai": url + "/v1", "hosted_vllm": url + "/v1", "anthropic": url, "ollama_chat": url}
seen = {}
for provider, base in bases.items():
    options = {"model": f"{provider}/quill", "api_base": base, "api_key": key, "max_tokens": 100}
    whole = litellm.completion(messages=question, **options)
    parts = list(litellm.completion(messages=question, stream=True, **options))
    called = litellm.completion(messages=weather, tools=[tool], **options)
    calls = called.choices[0].message.tool_calls
    seen[provider] = {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(part.choices[0].delta.content or "" for part in parts),
        "finish": whole.choices[0].finish_reason,
        "completion_tokens": whole.usage.completion_tokens,
        "calls": [[call.function.name, json.loads(call.function.arguments)] for call in calls],
        "called": called.choices[0].finish_reason,
    }
print(json.dumps(seen))
