"""A server that works on token ids only."""

from __future__ import annotations

from pathlib import Path

from tests.api.server import running


def test_token_ids_in_and_texts_refused(tmp_path: Path) -> None:
    with running(tmp_path, skip_tokenizer_init=True) as server:
        answer = server.post("/v1/completions", {"prompt": [67, 68], "max_tokens": 3, "logprobs": 0}).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:69", "token_id:70", "token_id:71"]
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            refused = server.post(path, body)
            assert refused.status_code == 400
            assert "no tokenizer" in refused.json()["error"]["message"]
        messages = [{"role": "user", "content": "a"}]
        for path, body in (
            ("/v1/chat/completions", {}),
            ("/v1/messages", {"max_tokens": 1}),
            ("/api/chat", {"model": "tiny"}),
        ):
            chat = server.post(path, {"messages": messages, **body})
            assert (chat.status_code, "no tokenizer (--skip-tokenizer-init)" in chat.text) == (400, True)
        stop = server.post("/v1/completions", {"prompt": [67], "stop": "a"})
        assert (stop.status_code, stop.json()["error"]["param"]) == (400, "stop")
