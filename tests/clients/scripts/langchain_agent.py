"""LangChain: an agent with a tool, whole and streamed, and plain chat."""

import json
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, key = sys.argv[1:]


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    return json.dumps({"temperature": -5, "condition": "snowy"})


model = ChatOpenAI(model="quill", base_url=url + "/v1", api_key=key, temperature=0, max_retries=0)
agent = create_agent(model, [get_weather])
question = {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}]}

messages = agent.invoke(question)["messages"]
streamed = [part for part, _ in agent.stream(question, stream_mode="messages")]
plain = model.invoke("What is 12 + 30?")
print(
    json.dumps(
        {
            "types": [message.type for message in messages],
            "calls": messages[1].tool_calls,
            "answer": messages[-1].content,
            "streamed": "".join(part.content for part in streamed if part.type == "AIMessageChunk"),
            "usage": plain.usage_metadata,
            "sum": plain.content,
        }
    )
)
