"""LangChain: a question with an image, whole and streamed."""

import base64
import json
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

url, key, path = sys.argv[1:]
data = base64.b64encode(Path(path).read_bytes()).decode()
content = [
    {"type": "text", "text": "What?"},
    {"type": "image", "base64": data, "mime_type": "image/png"},
]
model = ChatOpenAI(
    model="tiny",
    base_url=url + "/v1",
    api_key=key,
    temperature=0,
    max_retries=0,
    max_completion_tokens=8,
    extra_body={"ignore_eos": True},
)
question = [HumanMessage(content=content)]
whole = model.invoke(question).content
streamed = "".join(chunk.content for chunk in model.stream(question))
print(json.dumps({"whole": whole, "streamed": streamed}))
