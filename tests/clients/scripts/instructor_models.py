"""Instructor: a pydantic model out of a text, through each of its ways to ask an OpenAI server for it."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

url, key = sys.argv[1:]


class Person(BaseModel):
    """Somebody."""

    name: str
    city: str


client = OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
question = [{"role": "user", "content": "Extract name and city as JSON: Anna lives in Oslo."}]
seen = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON):
    asking = instructor.from_openai(client, mode=mode)
    person = asking.create(model="quill", messages=question, response_model=Person, max_retries=0, temperature=0)
    seen[mode.value] = person.model_dump()
print(json.dumps(seen))
