"""Parts of messages that are images, in the forms that clients send and chat templates take."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.offline.media import without_media
from quire.serving.api.schemas.chat import ChatMessage, MediumPart, SeenMedia, plain_messages

URL = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "image": URL},
        {"type": "image", "url": URL, "uuid": "a"},
    ],
)
def test_images_stay_in_their_places(part: dict[str, Any]) -> None:
    message = {"role": "user", "content": [TEXT, part, TEXT]}
    found: dict[str, Any] = {}
    for form in ("text", "parts", "as sent"):
        seen = SeenMedia({"image": "<image>"})
        (found[form],) = plain_messages([ChatMessage.model_validate(message)], content=form, media=seen)  # type: ignore[arg-type]
        assert seen.parts == [MediumPart("messages[0].content[1]", URL, part.get("uuid"))]
    assert found["text"]["content"] == "What?\n<image>\nWhat?"
    assert found["parts"] == found["as sent"] == {"role": "user", "content": [TEXT, {"type": "image"}, TEXT]}
    assert without_media([message], None) == ([found["parts"]], [("image", URL)])
    assert without_media([message], {"image": "<image>"}) == ([found["text"]], [("image", URL)])


def test_models_that_read_text_alone_are_shown_no_images() -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    with pytest.raises(RequestError, match="not supported"):
        plain_messages([ChatMessage(role="user", content=[part])], content="parts")  # type: ignore[list-item]
    (given,) = plain_messages([ChatMessage(role="tool", content=[part])], content="text")  # type: ignore[list-item]
    assert given["content"] == "[image: this model cannot see images]"
