"""Images in the bodies of every API, answered by a real engine, and media that mean harm."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import PIL.Image
import pytest

from quire.errors import RequestError
from quire.serving.api.large_requests.readers import LargeRequestReaders
from tests.api.server import Server, serving
from tests.clients.environment import run_script
from tests.media.checkpoints import IMAGE, IMAGE_TOKEN, TOKENS, file_of, make_llava, picture
from tests.media.hostile import HARMFUL, ODD, PNG, data_url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    (directory / "media").mkdir()
    (directory / "media" / "a.png").write_bytes(file_of(picture(seed=0)))
    (directory / "secret.png").write_bytes(file_of(picture(seed=0)))
    (directory / "media" / "link.png").symlink_to(directory / "secret.png")
    settings = {"max_model_len": 256, "block_size": 8, "limit_mm_per_prompt": {"image": 4}}
    model, media = make_llava(directory / "model"), str(directory / "media")
    with serving(model, allowed_local_media_path=media, **settings) as server:
        yield server


OTHER = file_of(picture(seed=1))


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8,
        "ignore_eos": True, **more,
    }  # fmt: skip


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def answer(server: Server, body: dict[str, Any]) -> str:
    found = server.post("/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["message"]["content"]
    return text


def test_every_api_shows_the_model_the_same_image(server: Server) -> None:
    expected = answer(server, chat(image(data_url(PNG)), "What?"))
    assert expected != answer(server, chat(image(data_url(OTHER)), "What?"))
    assert expected == answer(server, chat({"type": "input_image", "image_url": data_url(PNG)}, "What?"))
    assert expected == answer(server, chat(image(f"file://{_media(server)}/a.png"), "What?"))

    encoded = base64.b64encode(PNG).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    found = server.post("/v1/messages", body).json()
    assert found["content"][0]["text"] == expected
    counted = server.post("/v1/messages/count_tokens", {"model": "tiny", "messages": body["messages"]}).json()
    assert counted["input_tokens"] == found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"]

    parts = [{"type": "input_image", "image_url": data_url(PNG)}, {"type": "input_text", "text": "What?"}]
    asked = {"model": "tiny", "input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0}
    first = server.post("/v1/responses", asked).json()
    assert first["output"][0]["content"][0]["text"] == expected
    again = server.post(
        "/v1/responses",
        {"model": "tiny", "input": "And now?", "previous_response_id": first["id"], "max_output_tokens": 4},
    ).json()
    assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"] >= TOKENS

    messages = [{"role": "user", "content": "What?", "images": [encoded]}]
    options = {"num_predict": 8, "temperature": 0}
    ollama = server.post("/api/chat", {"model": "tiny", "messages": messages, "options": options, "stream": False})
    assert ollama.json()["message"]["content"] == expected
    body = {"model": "tiny", "prompt": "What?", "images": [encoded], "options": options, "stream": False}
    assert server.post("/api/generate", body).json()["response"] == expected
    assert "vision" in server.post("/api/show", {"model": "tiny"}).json()["capabilities"]


def test_the_official_clients_send_images(server: Server) -> None:
    """The packages of OpenAI, Anthropic and Ollama, unmodified."""
    expected, question = answer(server, chat(image(data_url(PNG)), "What?")), "What?"
    ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    parts: Any = [image(data_url(PNG)), {"type": "text", "text": question}]
    asked: Any = [{"role": "user", "content": parts}]
    chunks = ours.chat.completions.create(model="tiny", messages=asked, temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    shown: Any = [{"type": "input_image", "image_url": data_url(PNG)}, {"type": "input_text", "text": question}]
    given: Any = [{"role": "user", "content": shown}]
    response = ours.responses.create(model="tiny", input=given, temperature=0, max_output_tokens=8)
    assert response.output_text == expected

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    theirs = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    told: Any = [{"role": "user", "content": blocks}]
    with theirs.messages.stream(model="tiny", max_tokens=8, messages=told, extra_body={"temperature": 0}) as messages:
        assert messages.get_final_text() == expected

    message = ollama.Message(role="user", content=question, images=[ollama.Image(value=PNG)])
    found = ollama.Client(host=server.url).chat("tiny", [message], options={"num_predict": 8, "temperature": 0})
    assert found.message.content == expected


@pytest.mark.long("api")
def test_langchain_sends_images(server: Server, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(PNG)
    seen = run_script("langchain_image", server.url, "none", str(tmp_path / "image.png"))
    expected = answer(server, chat("What?", image(data_url(PNG)), max_tokens=8))
    assert seen == {"whole": expected, "streamed": expected}


def _media(server: Server) -> str:
    path = server._config.media.allowed_local_media_path
    assert path is not None
    return path


def test_an_image_that_a_tool_gave_is_seen(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [image(data_url(PNG))]},
    ]
    found = server.post("/v1/chat/completions", chat() | {"messages": messages, "return_token_ids": True})
    assert found.status_code == 200, found.text
    assert found.json()["prompt_token_ids"].count(IMAGE_TOKEN) == TOKENS


def test_a_uuid_names_an_image_again_within_its_salt_and_never_another_image(server: Server) -> None:
    first, other = (answer(server, chat(image(data_url(each)), "What?")) for each in (PNG, OTHER))
    named = image(data_url(PNG)) | {"uuid": "a"}
    alone = {"type": "image_url", "image_url": None, "uuid": "a"}
    assert answer(server, chat(named, "What?", cache_salt="x")) == first
    assert answer(server, chat(alone, "What?", cache_salt="x")) == first
    assert answer(server, chat(image(data_url(OTHER)) | {"uuid": "a"}, "What?", cache_salt="x")) == other
    assert answer(server, chat(alone, "What?", cache_salt="x")) == other  # which has this name since
    for wrong in (chat(alone, "What?"), chat(alone, "What?", cache_salt="y"), chat(alone | {"uuid": "b"}, "What?")):
        found = server.post("/v1/chat/completions", wrong)
        assert found.status_code == 400
        assert "is kept here any more: send the image as well" in found.json()["error"]["message"]
    for uuid, message in ((5, "must be a text"), ("x" * 300, "1 to 256 characters"), ("", "1 to 256 characters")):
        found = server.post("/v1/chat/completions", chat(image(data_url(PNG)) | {"uuid": uuid}, "What?"))
        assert (found.status_code, message in found.text) == (400, True), found.text


def test_a_request_says_how_its_images_are_read(server: Server) -> None:
    see_through = picture(seed=0).convert("RGBA")
    see_through.putalpha(see_through.convert("L").point(lambda value: 255 if value > 128 else 0))
    url = data_url(file_of(see_through))
    plain = answer(server, chat(image(url), "What?"))
    assert plain == answer(server, chat(image(data_url(PNG)), "What?"))  # transparency is left out
    white = {"image": {"rgba_background_color": [255, 255, 255]}}
    on_white = answer(server, chat(image(url), "What?", media_io_kwargs=white))
    white_first = PIL.Image.new("RGB", see_through.size, "white")
    white_first.paste(see_through, mask=see_through)
    assert plain != on_white == answer(server, chat(image(data_url(file_of(white_first))), "What?"))
    cropped = answer(server, chat(image(data_url(PNG)), "What?", mm_processor_kwargs={"size": {"shortest_edge": 60}}))
    assert cropped != plain
    assert plain == answer(server, chat(image(url), "What?", mm_processor_kwargs={}))
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"mm_processor_kwargs": {"colour": 1}}, "'colour' is not supported", "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"crop_size": 9}}, "the tower reads squares of 42", "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"size": []}}, "must have a height and a width", "mm_processor_kwargs"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}}, "three numbers", "media_io_kwargs"),
        ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "must be RGB", "media_io_kwargs"),
        ({"media_io_kwargs": {"smell": {}}}, "there is no kind 'smell'", "media_io_kwargs"),
        ({"mm_processor_kwargs": {"size": "x" * 5000}}, "at most 4096 characters", ""),
    ]
    for more, message, param in refused:
        found = server.post("/v1/chat/completions", chat(image(data_url(PNG)), "a", **more))
        assert (found.status_code, message in found.text) == (400, True), found.text
        assert found.json()["error"]["param"] == (param or None)


def test_tokens_of_images_are_counted(server: Server) -> None:
    body = chat(image(data_url(PNG)), "What?", image(data_url(OTHER)), return_token_ids=True)
    tokens = server.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    found = server.post("/tokenize", {"model": "tiny", "messages": body["messages"]}).json()
    assert (found["tokens"], found["count"]) == (tokens, len(tokens))
    assert tokens.count(IMAGE_TOKEN) == 2 * TOKENS


def test_harmful_media_are_refused_and_others_are_served_on(server: Server) -> None:
    for name, url in HARMFUL.items():
        found = server.post("/v1/chat/completions", chat(image(url.format(media=_media(server))), "What?"))
        assert found.status_code == 400, (name, found.text)
        assert found.json()["error"]["param"] == "messages[0].content[0]", (name, found.text)
        assert "time and memory" not in found.text, (name, "it took its reader down")
    for name, content in ODD.items():
        found = server.post("/v1/chat/completions", chat(image(data_url(content)), "What?"))
        assert found.status_code == 200, (name, found.text)
    server.assert_all_free()


def test_an_image_is_read_once_however_often_it_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = answer(server, chat(image(data_url(OTHER)), "What?"))

    async def ask(readers: LargeRequestReaders, task: Any) -> Any:
        raise RequestError("read again")

    monkeypatch.setattr(LargeRequestReaders, "ask", ask)
    assert answer(server, chat(image(data_url(OTHER)), "What?")) == first
    found = server.post("/v1/chat/completions", chat(image(data_url(file_of(picture(seed=9)))), "What?"))
    assert "read again" in found.text


def test_parts_and_limits_that_are_wrong_are_named(server: Server) -> None:
    good = image(data_url(PNG))
    refused: list[tuple[dict[str, Any], str]] = [
        (chat(*[good] * 5), "at most 4 images"),
        (chat({"type": "image_url"}, "a"), "has no image"),
        (chat({"type": "image_url", "image_url": {"url": 5}}), "must be a text"),
        (chat({"type": "input_image", "file_id": "file-1"}), "images of files are not read"),
        (chat({"type": "input_audio", "input_audio": {}}), "are not supported yet"),
        (chat(good, f"What is {IMAGE}?"), "2 placeholders for images and 1 images"),
        (chat(good, "a", truncate_prompt_tokens=5), "truncate_prompt_tokens cannot be combined with media"),
        (chat(good, "a", use_beam_search=True, n=2), "use_beam_search cannot be combined with media"),
        (chat(good, "a " * 300), "maximum context length"),
    ]
    for body, message in refused:
        found = server.post("/v1/chat/completions", body)
        assert found.status_code == 400, found.text
        assert message in found.json()["error"]["message"], found.text
    assert "cannot be rendered" in server.post("/v1/chat/completions/render", chat(good, "a")).text
