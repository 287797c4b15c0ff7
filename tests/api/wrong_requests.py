"""Requests that are wrong or hostile, and the exact answer each must get from any server, whatever its model.

Sent one by one beside a healthy stream by the tests of the API and, over real processes, end to end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class WrongRequest:
    """One request and its answer.

    Attributes:
        message: The whole error message; with `…` at its end, the beginning of it.
        param: The field that is named.
    """

    name: str
    body: bytes
    status: int
    message: str
    param: str | None = None
    method: str = "POST"
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)

    def matches(self, message: str) -> bool:
        """Whether the server said the right thing."""
        if self.message.endswith("…"):
            return message.startswith(self.message[:-1])
        return message == self.message


def _completion(name: str, message: str, param: str | None = None, status: int = 400, **fields: Any) -> WrongRequest:
    return WrongRequest(name, json.dumps({"prompt": "a"} | fields).encode(), status, message, param)


def _chat(name: str, message: str, param: str | None = None, status: int = 400, **fields: Any) -> WrongRequest:
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    return WrongRequest(name, json.dumps(body).encode(), status, message, param, path="/v1/chat/completions")


def _raw(name: str, body: bytes, message: str, status: int = 400, **options: Any) -> WrongRequest:
    return WrongRequest(name, body, status, message, **options)


def _unsupported(name: str, value: Any, advice: str = "leave it out") -> WrongRequest:
    return _chat(f"unsupported {name}", f"'{name}' is not supported yet: {advice}.", name, **{name: value})


_PROMPT = "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids."
_NO_ROUTE = "There is no such route. GET /docs lists all of them."
_NO_METHOD = "This route does not take this method. GET /docs lists all routes."
_BAD_JSON = "The request body is not valid JSON: …"
_NOT_OBJECT = "The request body must be a JSON object."
_DEEP = 50_000

BODIES = [
    _raw("empty body", b"", _BAD_JSON),
    _raw("not JSON", b"{prompt: a}", _BAD_JSON),
    _raw("cut off JSON", b'{"prompt": "a', _BAD_JSON),
    _raw("two JSON values", b"{} {}", _BAD_JSON),
    _raw("invalid UTF-8", b'{"prompt": "\xff\xfe"}', _BAD_JSON),
    _raw("NaN", b'{"prompt": "a", "temperature": NaN}', _BAD_JSON),
    _raw("an infinite number", b'{"prompt": "a", "temperature": 1e999}', _BAD_JSON),
    _raw("half a surrogate pair", b'{"prompt": "\\ud83d"}', _BAD_JSON),
    _raw("a list", b"[]", _NOT_OBJECT),
    _raw("a string", b'"prompt"', _NOT_OBJECT),
    _raw("null", b"null", _NOT_OBJECT),
    _raw("deep lists", b'{"prompt": ' + b"[" * _DEEP + b"]" * _DEEP + b"}", "The request body is nested too deeply."),
    _raw("deep objects", b'{"a":' * _DEEP + b"1" + b"}" * _DEEP, "The request body is nested too deeply."),
    _raw("a form", b"prompt=a", "Send JSON, with the header 'Content-Type: application/json'.", 415,
         headers={"Content-Type": "application/x-www-form-urlencoded"}),
    _raw("plain text", b'{"prompt": "a"}', "Send JSON, with the header 'Content-Type: application/json'.", 415,
         headers={"Content-Type": "text/plain"}),
    _raw("a name of 100,000 letters", b'{"' + b"x" * 100_000 + b'": 1}', f"'{'x' * 64}…"),
]  # fmt: skip

ROUTES = [
    _raw("no such route", b"{}", _NO_ROUTE, 404, path="/v1/nothing"),
    _raw("above the root", b"{}", _NO_ROUTE, 404, path="/v1/%2e%2e/%2e%2e/etc/passwd"),
    _raw("engines of old", b"{}", _NO_ROUTE, 404, path="/v1/engines/x/completions"),
    _raw("GET a completion", b"", _NO_METHOD, 405, method="GET", headers={}),
    _raw("DELETE a chat", b"", _NO_METHOD, 405, method="DELETE", path="/v1/chat/completions", headers={}),
    _raw("POST models", b"{}", _NO_METHOD, 405, path="/v1/models"),
    _raw("an unknown model's card", b"", "The model 'gpt-4' is not served here. Served: …", 404, param="model",
         method="GET", path="/v1/models/gpt-4", headers={}),
]  # fmt: skip

COMPLETIONS = [
    _completion("unknown model", "The model 'gpt-4' is not served here. Served: …", "model", 404, model="gpt-4"),
    _completion("model is a number", "model must be a valid string.", "model", model=4),
    _raw("no prompt", b"{}", "'prompt' is required.", param="prompt"),
    _completion("null prompt", _PROMPT, "prompt", prompt=None),
    _completion("prompt is a number", _PROMPT, "prompt", prompt=7),
    _completion("prompt is an object", _PROMPT, "prompt", prompt={"text": "a"}),
    _completion("prompt is an empty list", _PROMPT, "prompt", prompt=[]),
    _completion("a mixed list", _PROMPT, "prompt", prompt=["a", 1]),
    _completion("token ids as floats", _PROMPT, "prompt", prompt=[1.5]),
    _completion("token ids as booleans", _PROMPT, "prompt", prompt=[True]),
    _completion("an empty list of ids", "The prompt is empty: send at least one token.", "prompt", prompt=[[]]),
    _completion("empty text", "The prompt is empty: send at least one token.", "prompt", prompt=""),
    _completion("one of two is empty", "The prompt is empty: send at least one token.", "prompt", prompt=["a", ""]),
    _completion("a negative token id", "Token id -1 is outside the vocabulary of …", "prompt", prompt=[1, -1]),
    _completion("a huge token id", "Token id 2147483648 is outside the vocabulary of …", "prompt", prompt=[2**31]),
    _completion("a token id beyond 64 bits", "Token id 1180591620717411303424 is outside the vocabulary of …",
                "prompt", prompt=[2**70]),
    _completion("a prompt beyond the context", "The prompt has 50000 tokens and must leave room …", "prompt",
                prompt=[5] * 50_000),
    _completion("a text beyond the context", "The prompt has …", "prompt", prompt="a b " * 50_000),
    _completion("a text of megabytes", "The prompt has more than …", "prompt", prompt="x" * 8_000_000),
    _completion("too many prompts", "A request may ask for at most 1024 sequences (prompts × n).", "prompt",
                prompt=["a"] * 1_025),
    _completion("too many prompts times n", "A request may ask for at most 1024 sequences (prompts × n).", "prompt",
                prompt=["a"] * 9, n=128),
    _completion("n is 0", "n must be between 1 and 128, got 0.", "n", n=0),
    _completion("n is huge", "n must be between 1 and 128, got 1000000.", "n", n=1_000_000),
    _completion("n is a text", "n must be a valid integer.", "n", n="2"),
    _completion("n is true", "n must be a valid integer.", "n", n=True),
    _completion("n is a fraction", "n must be a valid integer…", "n", n=1.5),
    _completion("n and greedy", "n must be 1 when temperature is 0: all sequences would be the same.", "n",
                n=2, temperature=0),
    _completion("max_tokens is 0", "max_tokens must be at least 1, got 0.", "max_tokens", max_tokens=0),
    _completion("max_tokens is negative", "max_tokens must be at least 1, got -5.", "max_tokens", max_tokens=-5),
    _completion("max_tokens beyond the context", "The prompt has 1 tokens and max_tokens is 100000; …", "max_tokens",
                prompt=[5], max_tokens=100_000),
    _completion("max_tokens beyond 64 bits", f"The prompt has 1 tokens and max_tokens is {2**70}; …", "max_tokens",
                prompt=[5], max_tokens=2**70),
    _completion("min_tokens above max_tokens", "min_tokens (5) must not exceed max_tokens (4).", "min_tokens",
                min_tokens=5, max_tokens=4),
    _completion("temperature is negative", "temperature must be at least 0, got -0.1.", "temperature",
                temperature=-0.1),
    _completion("temperature is a text", "temperature must be a valid number.", "temperature", temperature="hot"),
    _completion("top_p is 0", "top_p must be in (0, 1], got 0.0.", "top_p", top_p=0),
    _completion("top_p is 1.1", "top_p must be in (0, 1], got 1.1.", "top_p", top_p=1.1),
    _completion("top_k is -2", "top_k must be at least -1, got -2.", "top_k", top_k=-2),
    _completion("min_p is 2", "min_p must be in [0, 1], got 2.0.", "min_p", min_p=2),
    _completion("seed beyond 64 bits", "seed must be between …", "seed", seed=2**64),
    _completion("an empty stop string", "stop strings must not be empty.", "stop", stop=""),
    _completion("an empty stop string in a list", "stop strings must not be empty.", "stop", stop=["a", ""]),
    _completion("stop is a number", "stop must be a valid string or a valid list.", "stop", stop=1),
    _completion("too many stop strings", "stop takes at most 64 strings, got 65.", "stop", stop=["a"] * 65),
    _completion("a stop token outside", "stop_token_ids: 99999999 is outside the vocabulary of …", "stop_token_ids",
                stop_token_ids=[99_999_999]),
    _completion("a negative stop token", "stop_token_ids must be at least 0, got -1.", "stop_token_ids",
                stop_token_ids=[-1]),
    _completion("too many logprobs", "logprobs must be at most 20 on this server, got 21.", "logprobs", logprobs=21),
    _completion("all logprobs", "logprobs must be at most 20 on this server, got -1.", "logprobs", logprobs=-1),
    _completion("logprobs is negative", "logprobs must be at least -1, got -2.", "logprobs", logprobs=-2),
    _completion("stream is a text", "stream must be a valid boolean.", "stream", stream="yes"),
    _completion("stream options without stream", "stream_options needs stream=true.", "stream_options",
                stream_options={"include_usage": True}),
    _completion("an unknown stream option", "'stream_options.usage' is not a known field.", "stream_options.usage",
                stream=True, stream_options={"usage": True}),
    _completion("a misspelt field", "'temprature' is not a known field. Did you mean 'temperature'?", "temprature",
                temprature=1),
    _completion("an unknown field", "'zzz' is not a known field.", "zzz", zzz=1),
    _completion("chat's field", "'messages' is not a known field.", "messages", messages=[]),
    _completion("echo", "'echo' is not supported yet: leave it out.", "echo", echo=True),
    _completion("suffix", "'suffix' is not supported yet: leave it out.", "suffix", suffix="b"),
    _completion("best_of", "'best_of' is not supported yet: leave it out.", "best_of", best_of=2),
    _completion("prompt_embeds", "'prompt_embeds' is not supported yet: leave it out.", "prompt_embeds",
                prompt_embeds="gANj"),
]  # fmt: skip

CHAT = [
    _raw("no messages", b"{}", "'messages' is required.", param="messages", path="/v1/chat/completions"),
    _chat("empty messages", "messages must not be empty.", "messages", messages=[]),
    _chat("messages is a text", "messages must be a valid list.", "messages", messages="hi"),
    _chat("a message is a text", "messages[0] must be a valid dictionary …", "messages[0]", messages=["hi"]),
    _chat("no role", "'messages[0].role' is required.", "messages[0].role", messages=[{"content": "a"}]),
    _chat("an unknown role", "messages[0].role must be 'system', 'developer', …", "messages[0].role",
          messages=[{"role": "root", "content": "a"}]),
    _chat("no content", "messages[0].content must be a text.", "messages[0].content", messages=[{"role": "user"}]),
    _chat("content is a number", "messages[0].content must be a valid string or a valid list.", "messages[0].content",
          messages=[{"role": "user", "content": 5}]),
    _chat("an image", "messages[0].content[1]: parts of type 'image_url' are not supported yet: send text.",
          "messages[0].content[1]", messages=[{"role": "user", "content": [
              {"type": "text", "text": "what is this"},
              {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}]}]),
    _chat("a part without type", "'messages[0].content[0].type' is required.", "messages[0].content[0].type",
          messages=[{"role": "user", "content": [{"text": "a"}]}]),
    _chat("a text part without text", "messages[0].content[0].text must be a text.", "messages[0].content[0]",
          messages=[{"role": "user", "content": [{"type": "text"}]}]),
    _chat("an unknown field in a message", "messages[0]: 'colour' is not a known field.", "messages[0]",
          messages=[{"role": "user", "content": "a", "colour": "red"}]),
    _chat("tool arguments that are not JSON", "messages[0].tool_calls: arguments must be JSON.",
          "messages[0].tool_calls", messages=[{"role": "assistant", "tool_calls": [
              {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]),
    _chat("a conversation beyond the context", "The prompt has …", "prompt",
          messages=[{"role": "user", "content": "a b " * 50_000}]),
    _chat("top_logprobs alone", "top_logprobs needs logprobs=true.", "top_logprobs", top_logprobs=2),
    _chat("too many top_logprobs", "logprobs must be at most 20 on this server, got 21.", "logprobs",
          logprobs=True, top_logprobs=21),
    _chat("logprobs is a number", "logprobs must be a valid boolean.", "logprobs", logprobs=5),
    _chat("max_completion_tokens is 0", "max_tokens must be at least 1, got 0.", "max_tokens",
          max_completion_tokens=0),
    _chat("a template variable that is none", "chat_template_kwargs: 'tokenize' is no variable of this model's …",
          "chat_template_kwargs", chat_template_kwargs={"tokenize": True}),
    _chat("messages by the back door", "chat_template_kwargs: 'messages' is no variable of this model's …",
          "chat_template_kwargs", chat_template_kwargs={"messages": []}),
    _chat("continue and generate", "continue_final_message needs add_generation_prompt=false: …",
          "continue_final_message", continue_final_message=True, add_generation_prompt=True),
    _unsupported("chat_template", "{{ cycler.__init__.__globals__ }}", "start the server with --chat-template"),
    _unsupported("tools", [{"type": "function", "function": {"name": "f"}}]),
    _unsupported("tool_choice", "required"),
    _unsupported("functions", [{"name": "f"}]),
    _unsupported("function_call", {"name": "f"}),
    _unsupported("response_format", {"type": "json_object"}),
    _unsupported("logit_bias", {"5": -100}),
    _unsupported("presence_penalty", 0.5),
    _unsupported("frequency_penalty", -1),
    _unsupported("repetition_penalty", 1.1),
    _unsupported("best_of", True),
    _unsupported("structured_outputs", {"regex": "(a+)+$"}),
    _unsupported("guided_json", {"type": "object"}),
    _unsupported("guided_regex", "(a+)+$"),
    _unsupported("use_beam_search", True),
    _unsupported("prompt_logprobs", 5),
    _unsupported("bad_words", ["x"]),
    _unsupported("allowed_token_ids", [1]),
    _unsupported("priority", 1),
    _unsupported("cache_salt", "s"),
    _unsupported("reasoning_effort", "high"),
    _unsupported("modalities", ["audio"]),
    _unsupported("truncate_prompt_tokens", 5),
    _unsupported("request_id", "mine", "send the header X-Request-Id"),
]  # fmt: skip

TOKENS = [
    _raw("nothing to tokenize", b"{}", "Send either prompt or messages.", param="prompt", path="/tokenize"),
    _raw("both to tokenize", b'{"prompt": "a", "messages": []}', "Send either prompt or messages.", param="prompt",
         path="/tokenize"),
    _raw("tokens of a list", b'{"prompt": ["a"]}', "prompt must be a valid string.", param="prompt", path="/tokenize"),
    _raw("nothing to detokenize", b"{}", "'tokens' is required.", param="tokens", path="/detokenize"),
    _raw("a token that is none", b'{"tokens": [99999999]}', "Token id 99999999 is outside the vocabulary of …",
         param="tokens", path="/detokenize"),
    _raw("a negative token", b'{"tokens": [-1]}', "Token id -1 is outside the vocabulary of …", param="tokens",
         path="/detokenize"),
    _raw("a token as text", b'{"tokens": ["1"]}', "tokens[0] must be a valid integer.", param="tokens[0]",
         path="/detokenize"),
]  # fmt: skip

WRONG_REQUESTS = BODIES + ROUTES + COMPLETIONS + CHAT + TOKENS
assert len({request.name for request in WRONG_REQUESTS}) == len(WRONG_REQUESTS)
