"""The process that reads large bodies, renders and encodes, one task after the other.

A task may take too much time or memory: then LargeRequestReaders kills the process and starts another. The process has
a low priority: the model, the event loop and other requests come first.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import socket
from collections.abc import Sequence
from functools import cached_property
from typing import cast

from pydantic import BaseModel

from quire.errors import RequestError
from quire.foundation.config import Config, environment
from quire.foundation.processes.helper_process import Channel, run_helper
from quire.media.fetch import MediaAccess
from quire.media.model_audio import ModelAudio, load_model_audio
from quire.media.model_images import ImageSettings
from quire.media.model_media import ModelMedia, load_model_media
from quire.media.model_sounds import load_model_sounds
from quire.serving.api.large_requests.readers import (
    Answer,
    CheckBody,
    Decode,
    Encode,
    ReadAudio,
    ReadMedium,
    Render,
    Setup,
    Task,
    pack,
    unpack,
)
from quire.serving.api.request_body import check_fields, decode_body
from quire.serving.api.schemas.known_fields import UnknownFields
from quire.text.chat_template import ChatTemplate
from quire.text.fill_in_middle import fill_in_middle
from quire.text.model_text import ModelText, load_model_text
from quire.text.tokenizer import Tokenizer

NICENESS = 15
"""A low priority: a core that the model waits for is given back within milliseconds."""
ADDRESS_SPACE = 12 * 2**30
"""Bytes that the process may map: a text takes a hundred times its size while it is encoded, and threads reserve
much."""
_KEPT_SETTINGS = 16
_TRIMMED = 2**20
"""Memory is given back to the machine after a task of more bytes."""


def main(connection: socket.socket) -> None:
    """Do the tasks that come, until the process is killed."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    environment.encode_in_one_thread()
    channel = Channel[Answer, Setup | Task](connection, cast(type[Setup | Task], Setup | Task))
    setup = channel.receive(None)
    assert isinstance(setup, Setup)
    reader = Reader(setup.config)
    reader.load_processors()
    os.nice(NICENESS)
    channel.send(Answer())  # ready
    while True:
        task = channel.receive(None)
        assert task is not None
        assert not isinstance(task, Setup)
        answer = reader.answer(task)
        channel.send(answer)
        large = task.size > _TRIMMED
        del task, answer
        if large and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)  # otherwise the C library keeps what a long text took, some gigabytes, for the next one


class Reader:
    """Does tasks. The model's files are read when they are needed first."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._media_by_settings: dict[tuple[str, str], ModelMedia] = {}

    def load_processors(self) -> None:
        """Load what takes seconds before the first sound can be read. No request waits for a process of low priority to
        do it."""
        if load_model_sounds(self._config) is not None and self._media.sounds is not None:
            self._media.sounds.load_processor()

    def answer(self, task: Task) -> Answer:
        try:
            match task:
                case CheckBody():
                    return _check(task)
                case Encode():
                    return Answer(tokens=pack(self._encode(task)))
                case Decode(tokens):
                    return Answer(self._tokenizer.decode(unpack(tokens), skip_special_tokens=False))
                case Render():
                    return Answer(self._render(task))
                case ReadAudio(content, pads_short):
                    return Answer(medium=self._audio.read(content, pads_short=pads_short))
                case ReadMedium(kind, url, content, processor, io):
                    media = self._media_of(processor, io)
                    return Answer(medium=media.of_value(kind, content or self._access.read(url, kind)))
        except RequestError as error:
            return Answer.refusal(error)
        except MemoryError:
            return Answer(error="RequestError", message="The request needs too much memory: make it smaller.")

    @cached_property
    def _text(self) -> ModelText:
        return load_model_text(self._config)

    @cached_property
    def _media(self) -> ModelMedia:
        return load_model_media(self._config)

    def _media_of(self, processor: str, io: str) -> ModelMedia:
        """Return what the model makes of media under a request's settings, which many requests share."""
        key = processor, io
        if key not in self._media_by_settings:
            if len(self._media_by_settings) >= _KEPT_SETTINGS:
                self._media_by_settings.clear()
            settings = ImageSettings(json.loads(processor), json.loads(io))
            self._media_by_settings[key] = self._media.with_settings(settings)
        return self._media_by_settings[key]

    @cached_property
    def _audio(self) -> ModelAudio:
        audio = load_model_audio(self._config)
        assert audio is not None, "sounds for a model that cannot hear"
        return audio

    @cached_property
    def _access(self) -> MediaAccess:
        return MediaAccess.of(self._config)

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._text.tokenizer
        assert tokenizer is not None, "there is no text without a tokenizer"
        return tokenizer

    def _encode(self, task: Encode) -> Sequence[int]:
        if task.behind is not None:
            marks = fill_in_middle(self._tokenizer)
            assert marks is not None
            return marks.prompt(self._tokenizer, task.text, task.behind)
        tokens = self._tokenizer.encode(task.text, task.add_special_tokens)
        if task.kept is None:
            return tokens
        count, side = task.kept
        return tokens[:count] if side == "right" else tokens[-count:]

    def _render(self, task: Render) -> str:
        return self._template(task).render(
            task.messages,
            tools=task.tools,
            documents=task.documents,
            add_generation_prompt=task.add_generation_prompt,
            continue_final_message=task.continue_final_message,
            variables=task.variables,
        )

    def _template(self, task: Render) -> ChatTemplate:
        template = self._text.chat_template
        assert template is not None, "a conversation is rendered by a template"
        if task.template is not None:
            return template.replaced(task.template)
        return template.with_tools() if task.tools else template


def _check(task: CheckBody) -> Answer:
    body = decode_body(task.raw)
    if task.schema:
        module, _, name = task.schema.partition(":")
        schema: type[BaseModel] = getattr(importlib.import_module(module), name)
        check_fields(body, schema, task.lists, UnknownFields(ignored=task.ignores_unknown))
    return Answer()


if __name__ == "__main__":
    run_helper(main)
