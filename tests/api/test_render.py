"""What would run: render routes, /invocations, fill-in-the-middle, /tokenizer_info."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken

from tests.api.server import Server, running
from tests.checkpoints import VOCAB_SIZE, write_tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0.0, "seed": 5}


def test_a_rendered_chat_runs_as_the_chat_does(server: Server) -> None:
    rendered = server.post("/v1/chat/completions/render", CHAT).json()
    answer = server.post("/inference/v1/generate", rendered).json()
    chat = server.post("/v1/chat/completions", CHAT | {"return_token_ids": True}).json()
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    server.assert_all_free()


def test_rendered_completions_are_a_list_and_cut_as_they_would_be(server: Server) -> None:
    body = {"prompt": [[5, 6, 7, 8], "ab"][:1], "truncate_prompt_tokens": 2, "truncation_side": "right"}
    (rendered,) = server.post("/v1/completions/render", body | {"top_k": 7}).json()
    assert rendered["token_ids"] == [5, 6]
    assert rendered["sampling_params"]["top_k"] == 7
    assert rendered["sampling_params"]["max_tokens"] == 16
    assert "truncate_prompt_tokens" not in rendered["sampling_params"]


def test_the_form_of_the_output_is_rendered(server: Server) -> None:
    form = {"response_format": {"type": "json_object"}}
    for path, body in (("/v1/chat/completions/render", CHAT), ("/v1/completions/render", {"prompt": "a"})):
        answer = server.post(path, body | form).json()
        (rendered,) = answer if isinstance(answer, list) else [answer]
        assert rendered["sampling_params"]["structured_outputs"] == {"json_object": True}


def test_what_would_be_refused_is_refused(server: Server) -> None:
    for path, fields in (
        ("/v1/chat/completions/render", CHAT | {"max_tokens": 10**6}),
        ("/v1/completions/render", {"prompt": "a", "use_beam_search": True}),
    ):
        assert server.post(path, fields).status_code == 400


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8]), ("right", [5, 6]), (None, [7, 8])])
def test_the_side_that_is_cut_off(server: Server, side: str | None, kept: list[int]) -> None:
    body = {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "truncation_side": side, "max_tokens": 1}
    answer = server.post("/v1/completions", body | {"return_token_ids": True}).json()
    assert answer["choices"][0]["prompt_token_ids"] == kept


def test_invocations_are_what_their_body_says(server: Server) -> None:
    expected = {"messages": "chat.completion", "prompt": "text_completion"}
    for body in (CHAT, {"prompt": "a", "max_tokens": 1}):
        answer = server.post("/invocations", body)
        assert answer.json()["object"] == expected[next(iter(body))]
    tokens = {"token_ids": [5], "sampling_params": {"max_tokens": 2}}
    assert server.post("/invocations", tokens).json()["choices"][0]["token_ids"] == [6, 7]
    wrong = server.post("/invocations", {"inputs": "a"})
    assert wrong.status_code == 400
    assert "messages, prompt, token_ids" in wrong.json()["error"]["message"]
    lines = server.post("/invocations", CHAT | {"stream": True}).text
    assert lines.rstrip().endswith("data: [DONE]")


def test_a_gap_is_filled_where_the_model_can(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    core.save(str(tmp_path / "tokenizer.json"))
    body = {"prompt": "ab", "suffix": "cd", "max_tokens": 1}
    with running(tmp_path, vocab_size=VOCAB_SIZE + 3) as server:
        (rendered,) = server.post("/v1/completions/render", body).json()
        assert core.decode(rendered["token_ids"], skip_special_tokens=False) == (
            "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"
        )
        ids = server.post("/v1/completions", body | {"prompt": [5, 6]})
        assert (ids.status_code, ids.json()["error"]["param"]) == (400, "suffix")
        long = server.post("/v1/completions", body | {"suffix": "cd" * 20_000})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_elsewhere_a_suffix_is_refused(server: Server) -> None:
    refused = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    assert server.post("/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 1}).status_code == 200


def test_tokenizer_info_only_with_its_flag(server: Server, tmp_path: Path) -> None:
    assert server.get("/tokenizer_info").status_code == 404
    with running(tmp_path, enable_tokenizer_info_endpoint=True) as shown:
        info = shown.get("/tokenizer_info").json()
        assert info["eos_token"] == "<|im_end|>"
        assert "im_start" in info["chat_template"]


def test_one_token_too_many_is_refused_with_both_numbers(server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": [5] * 512, "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [5] * 512, "sampling_params": {}}),
        ("/invocations", {"prompt": [5] * 512, "max_tokens": 1}),
        ("/v1/completions/render", {"prompt": [5] * 512, "max_tokens": 1}),
    ):
        refused = server.post(path, body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].count("512") == 2, error["message"]
        fits = server.post(path, {**body, **({"prompt": [5] * 511} if "prompt" in body else {"token_ids": [5] * 511})})
        assert fits.status_code == 200
