"""Requests that are legal JSON and meant to cost much: each is refused, or answered without holding up anybody."""

from __future__ import annotations

from tests.e2e.poison.poison import CHAT, COMPLETIONS, MESSAGES, RESPONSES, USER, Poison, post

EITHER = (200, 400)


def nested_schema(depth: int) -> dict[str, object]:
    """Objects in objects."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


FLOODS: list[Poison] = [
    post("128 echoes with log probabilities", 400, COMPLETIONS, lambda: {
        "prompt": [5] * 1_900, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 1}),
    post("128 times the prompt's log probabilities", 400, COMPLETIONS, lambda: {
        "prompt": [5] * 1_900, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}),
    post("8 echoes with log probabilities", 200, COMPLETIONS, lambda: {
        "prompt": [5] * 500, "n": 8, "echo": True, "logprobs": 20, "max_tokens": 1}),
    post("the log probabilities of a long prompt", 200, COMPLETIONS, lambda: {
        "prompt": [5] * 1_900, "prompt_logprobs": 20, "max_tokens": 1}),
    post("1,024 prompts", 200, COMPLETIONS, lambda: {"prompt": [[5] * 20] * 1_024, "max_tokens": 1}),
    post("1,024 texts", 200, COMPLETIONS, lambda: {
        "prompt": ["Rivers, mountains and the sea: " * 4] * 1_024, "max_tokens": 1}),
    post("1,024 conversations", 200, "/v1/chat/completions/batch", lambda: {
        "messages": [USER] * 1_024, "max_tokens": 1}),
    post("1,024 prompts that are too long", 400, COMPLETIONS, lambda: {"prompt": [[5] * 1_000_000], "max_tokens": 1}),
    post("more prompts than sequences", 400, COMPLETIONS, lambda: {"prompt": ["a"] * 100_000}),
    post("128 choices of 8 prompts", 200, COMPLETIONS, lambda: {
        "prompt": [[5] * 20] * 8, "n": 128, "max_tokens": 1, "logprobs": 5}),
    post("a text of 15 MB", 400, COMPLETIONS, lambda: {"prompt": "a b " * 3_900_000}),
    post("a text of 15 MB, truncated", 200, COMPLETIONS, lambda: {
        "prompt": "a b " * 3_900_000, "truncate_prompt_tokens": 10, "max_tokens": 1}),
    post("a text of 15 MB, of which 2,000 tokens count", 200, COMPLETIONS, lambda: {
        "prompt": "a b " * 3_900_000, "truncate_prompt_tokens": 2_000, "max_tokens": 1}),
    post("a text of 15 MB without a space", 400, COMPLETIONS, lambda: {"prompt": "x" * 15_000_000}),
    post("a text of 3 MB of one letter, truncated", 200, COMPLETIONS, lambda: {
        "prompt": "x" * 3_000_000, "truncate_prompt_tokens": 10, "max_tokens": 1}),
    post("15 MB of tokens", 400, "/tokenize", lambda: {"prompt": "a b " * 3_900_000}),
    post("15 MB in a message", 400, CHAT, lambda: {"messages": [{"role": "user", "content": "a b " * 3_900_000}]}),
    post("15 MB of instructions", 400, RESPONSES, lambda: {"input": "a", "instructions": "a b " * 3_900_000}),
    post("more than a body may have", 413, COMPLETIONS, lambda: {"prompt": "a" * 17_000_000}),
    post("two million token ids", 400, COMPLETIONS, lambda: {"prompt": [5] * 2_000_000}),
    post("two million token ids to text", 400, "/detokenize", lambda: {"tokens": [5] * 2_000_000}),
    post("200,000 token ids to text", 200, "/detokenize", lambda: {"tokens": [5] * 200_000}),
    post("five million values", 400, COMPLETIONS, lambda: b'{"x": [' + b"{}," * 5_000_000 + b"{}]}"),
    post("15 MB of brackets", 400, COMPLETIONS, lambda: b'{"x": ' + b"[" * 15_000_000),
    post("200,000 fields", 400, COMPLETIONS, lambda: {f"x{i}": 1 for i in range(200_000)}),
    post("500,000 wrong values", 400, COMPLETIONS, lambda: {"prompt": "a", "stop_token_ids": ["x"] * 500_000}),
    post("100,000 messages", 400, CHAT, lambda: {"messages": USER * 100_000}),
    post("100,000 messages of Anthropic's", 400, MESSAGES, lambda: {"messages": USER * 100_000, "max_tokens": 2}),
    post("4,000 messages", 400, CHAT, lambda: {"messages": USER * 4_000}),
    post("100,000 conversations", 400, "/v1/chat/completions/batch", lambda: {"messages": [USER] * 100_000}),
    post("100,000 items", 400, RESPONSES, lambda: {"input": USER * 100_000}),
    post("100,000 parts", 400, CHAT, lambda: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a b c"}] * 100_000}]}),
    post("5,000 tools", 400, CHAT, lambda: {
        "messages": USER, "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5_000)]}),
    post("64 long stop strings", 200, COMPLETIONS, lambda: {
        "prompt": "a", "stop": [chr(97 + i % 26) * 4_000 + str(i) for i in range(64)], "max_tokens": 32}),
    post("64 stop strings of a megabyte", 400, COMPLETIONS, lambda: {
        "prompt": "a", "stop": ["a" * 200_000 + str(i) for i in range(64)]}),
    post("stop strings for 100 choices", 200, COMPLETIONS, lambda: {
        "prompt": "a", "stop": ["a" * 4_000 + str(i) for i in range(64)], "max_tokens": 4, "n": 100}),
    post("1,024 bad words", 200, COMPLETIONS, lambda: {
        "prompt": "a", "bad_words": [f"w{i} and more words of this" for i in range(1_024)], "max_tokens": 2}),
    post("half a million allowed tokens", 400, COMPLETIONS, lambda: {
        "prompt": "a", "allowed_token_ids": [5] * 500_000, "n": 100}),
    post("a million allowed tokens", 400, COMPLETIONS, lambda: {
        "prompt": "a", "allowed_token_ids": list(range(1_000_000))}),
    post("biases for 100 choices", 200, COMPLETIONS, lambda: {
        "prompt": "a", "logit_bias": {str(i): -1 for i in range(4_096)}, "n": 100, "max_tokens": 2}),
    post("biases for everything", 400, COMPLETIONS, lambda: {
        "prompt": "a", "logit_bias": {str(i): -1 for i in range(100_000)}}),
    post("a regex that explodes", EITHER, COMPLETIONS, lambda: {
        "prompt": "a", "structured_outputs": {"regex": "(" * 40 + "a" + "+)" * 40}, "max_tokens": 2}),
    post("a regex that counts", EITHER, COMPLETIONS, lambda: {
        "prompt": "a", "structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}, "max_tokens": 2}),
    post("a schema of 5 MB", 400, COMPLETIONS, lambda: {
        "prompt": "a", "guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(150_000)}}}),
    post("a schema of many levels", EITHER, COMPLETIONS, lambda: {
        "prompt": "a", "guided_json": nested_schema(12), "max_tokens": 2}),
    post("a schema of too many levels", 400, COMPLETIONS, lambda: b'{"prompt": "a", "guided_json": '
         + b'{"type": "array", "items": ' * 900 + b"{}" + b"}" * 901),
    post("a schema that refers to itself", EITHER, COMPLETIONS, lambda: {
        "prompt": "a", "guided_json": {"$ref": "#"}, "max_tokens": 2}),
    post("an array of a trillion", EITHER, COMPLETIONS, lambda: {
        "prompt": "a", "guided_json": {"minItems": 10**12, "type": "array"}, "max_tokens": 2}),
    post("choices of a megabyte", EITHER, COMPLETIONS, lambda: {
        "prompt": "a", "guided_choice": [f"{i}" + "x" * 1_000 for i in range(1_000)], "max_tokens": 2}),
    post("a grammar of a megabyte", 400, COMPLETIONS, lambda: {
        "prompt": "a", "guided_grammar": 'root ::= "a" ' + '| "b" ' * 200_000}),
    post("arguments that are nested", 400, CHAT, lambda: {"messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 100_000}}]}]}),
    post("a beam search of ten", 200, COMPLETIONS, lambda: {
        "prompt": "a", "use_beam_search": True, "n": 10, "max_tokens": 4}),
    post("a beam search of many prompts", 400, COMPLETIONS, lambda: {
        "prompt": ["a"] * 1_000, "use_beam_search": True, "n": 10, "max_tokens": 4}),
]  # fmt: skip
