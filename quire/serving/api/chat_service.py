"""Conversations: from a ChatRequest, which endpoints with another JSON make too, to its running answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.engine.structured_output.messages import LenientSchema
from quire.errors import RequestError
from quire.foundation.config import ServerConfig
from quire.foundation.messages.to_engine import MediaSpan, MediumKind
from quire.media.model_images import ImageSettings
from quire.sampling_params import SamplingParams
from quire.serving.api.chat_parsers import ChatParsers, OutputParsing
from quire.serving.api.json_pieces import check_answer_size
from quire.serving.api.media import AskedMedia, RequestMedia
from quire.serving.api.prompt_renderer import Conversation, PromptRenderer
from quire.serving.api.request_choices import RequestChoices
from quire.serving.api.schemas.chat import ChatRequest, SeenMedia
from quire.serving.api.schemas.known_fields import fields_named
from quire.serving.api.schemas.tools import ToolUse, shown_tools, tool_use
from quire.serving.api.session.session import EngineSession
from quire.structured_outputs_params import StructuredOutputsParams
from quire.text.model_text import ModelText
from quire.text.output_parsers.formats import Turn


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the engine takes it: tokens, which `params.truncate_prompt_tokens` may cut, and further
    `options` of EngineSession.add_request. `parsing` tells how the answer is parsed; None if its text is all content.
    `form_begins_late` tells whether the form of the answer may begin behind reasoning."""

    tokens: Sequence[int]
    params: SamplingParams
    options: dict[str, Any]
    parsing: OutputParsing | None = None
    may_call: bool = False
    form_begins_late: bool = False


@dataclass(frozen=True)
class ChatService:
    """Conversations with one model. A hint that the model cannot follow is dropped and named in the log once."""

    server: ServerConfig
    session: EngineSession
    text: ModelText
    renderer: PromptRenderer
    parsers: ChatParsers = field(default_factory=ChatParsers)
    media: RequestMedia | None = None

    @property
    def sees(self) -> bool:
        """Whether the model sees images."""
        return "image" in self.kinds

    @property
    def kinds(self) -> tuple[MediumKind, ...]:
        """The kinds of media that the model reads."""
        return () if self.media is None else self.media.kinds

    async def start(self, fields: ChatRequest) -> tuple[ChatPrompt, RequestChoices]:
        """Prepare a request and run it. Returns the prompt, and the running answers, which must be closed."""
        self.check_room(fields)
        prompt = await self.prepare(fields)
        return prompt, await self.run(fields, prompt)

    def check_room(self, fields: ChatRequest, conversations: int = 1) -> None:
        """Refuse so many conversations like this one if `prepare` would be in vain: raises RequestError for a wrong
        `n`, and OverloadedError if too many requests wait."""
        with fields_named(fields.field_names):
            sequences = conversations * fields.num_sequences
        self.session.check_room(sequences, sequences)

    async def prepare(self, fields: ChatRequest) -> ChatPrompt:
        """Check a request and render its conversation; nothing runs yet. Raises a RequestError that names a wrong
        field, or UnavailableError if no work is taken now."""
        with fields_named(fields.field_names):
            input_processor = self.session.input_processor
            input_processor.check_generates()
            return await self._prepare(fields, input_processor.longest)

    async def _prepare(self, fields: ChatRequest, longest: int) -> ChatPrompt:
        has_text = self.text.tokenizer is not None
        params = fields.sampling(
            self.text.defaults, text=has_text, max_tokens=fields.longest, logprobs=fields.num_logprobs
        )
        level, parallel = self.server.tool_strict_level, fields.parallel_tool_calls
        tools = tool_use(fields.tools, fields.tool_choice, parallel=parallel, level=level)
        if tools is not None and fields.use_beam_search:
            raise RequestError("tools cannot be combined with use_beam_search: leave one of them out.", param="tools")
        if tools is not None:
            tools = self.parsers.held(tools, self.text.hints)
        text, tokens, media = await self.rendered(fields, longest)
        if fields.longest is None:
            params = self.text.defaults.limit_chat(params, longest - len(tokens))
        check_answer_size(
            [len(tokens)],
            params,
            num_choices=fields.num_sequences,
            longest=longest,
            prompts_shown=fields.prompt_logprobs is not None or bool(fields.return_token_ids),
            held=fields.held,
        )
        if fields.verbosity not in (None, "medium"):
            self.text.hints.drop("verbosity", "the models know of none")
        turn = Turn.behind(text, fields.continued)
        parsing = self.parsers.parsing(tools, turn, formed=params.structured_outputs is not None)
        params = await self._constrained(params, tools, turn)
        behind = ""  # a grammar of calls has the reasoning in itself
        if tools is None and params.structured_outputs is not None:
            behind = self.parsers.before_form(turn)
        options = fields.options() | await self.output_options(params, turn, behind)
        if media:
            options["media"] = media
        if tools is not None and options.get("lenient"):
            options["lenient"] = _of_calls(options["lenient"], tools)
        return ChatPrompt(tokens, params, options, parsing, may_call=tools is not None, form_begins_late=bool(behind))

    async def rendered(self, fields: ChatRequest, longest: int) -> tuple[str, list[int], list[MediaSpan]]:
        """Return a conversation as text, as tokens, and its media. Raises RequestError if it cannot be rendered."""
        seen = None
        if self.media is not None and self.kinds:
            seen = SeenMedia(
                {kind: await self.renderer.decode([token]) for kind, token in self.media.placeholders.items()}
            )
        text = await self.renderer.render(self.conversation(fields), seen)
        if self.media is None or seen is None or not seen.parts:
            special, kept = bool(fields.add_special_tokens), fields.kept_tokens(longest)
            return text, await self.renderer.encode(text, special, longest, kept), []
        for name in ("truncate_prompt_tokens", "use_beam_search"):
            if getattr(fields, name):
                raise RequestError(f"{name} cannot be combined with media: leave one of them out.", param=name)
        self.media.check_count(seen.parts, longest)
        tokens = await self.renderer.encode(text, bool(fields.add_special_tokens), longest)
        settings = ImageSettings.of(fields.mm_processor_kwargs, fields.media_io_kwargs)
        asked = AskedMedia(settings, f"{fields.tenant} {fields.cache_salt or ''}")
        return text, *await self.media.placed(tokens, seen.parts, asked)

    async def output_options(
        self, params: SamplingParams, turn: Turn | None = None, behind: str = ""
    ) -> dict[str, Any]:
        """Return the bad words, grammar and thinking budget of these parameters, as `EngineSession.add_request` takes
        them. `turn` tells how a chat's answer begins, `behind` which reasoning may come before a form
        (`reasoning_in_front`). Raises a RequestError that names the field, or UnavailableError if too many grammars are
        being checked."""
        return {
            "bad_words": await self.renderer.bad_words(params.bad_words),
            "thinking": self.parsers.budget(params, turn, hints=self.text.hints),
            **await self.session.grammars.options(params, behind),
        }

    async def run(
        self, fields: ChatRequest, prompt: ChatPrompt, part_of: RequestChoices | None = None
    ) -> RequestChoices:
        """Start a request that was prepared, or another part of one. The choices must be closed. Raises RequestError if
        no engine could run it, and UnavailableError if no work is taken now."""
        names, first = fields.field_names, None if part_of is None else part_of.collector
        with fields_named(names):
            collector = await self.session.add_request([prompt.tokens], prompt.params, part_of=first, **prompt.options)
        return RequestChoices(self.session, collector, self.text.tokenizer, parsing=prompt.parsing, names=names)

    async def _constrained(self, params: SamplingParams, tools: ToolUse | None, turn: Turn) -> SamplingParams:
        """The parameters with the grammar of calls, if calls are enforced or the rest of the answer has a form."""
        if tools is None:
            return params
        form = params.structured_outputs
        if form is not None:
            await self.session.grammars.options(params)  # an error about the form alone names it
        schema = None if form is None else _schema(form)
        return msgspec.structs.replace(params, structured_outputs=self.parsers.constraint(tools, turn, schema))

    def conversation(self, fields: ChatRequest) -> Conversation:
        """What a request shows to the chat template; raises RequestError for a template of its own that this server
        does not trust."""
        own, asked = self.text.chat_template, fields.chat_template
        is_trusted = self.server.trust_request_chat_template or (own is not None and asked in own.names)
        if asked is not None and not is_trusted:
            named = f", or be one of {', '.join(own.names)}" if own is not None and own.names else ""
            raise RequestError(
                f"chat_template needs a server with --trust-request-chat-template{named}: leave it out.",
                param="chat_template",
            )
        effort = fields.reasoning_effort
        hidden = fields.tool_choice == "none" and self.server.exclude_tools_when_tool_choice_none
        return Conversation(
            fields.messages,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            variables=fields.chat_template_kwargs or {},
            reasoning_effort=effort and self.server.reasoning_effort_map.get(effort, effort),
            tools=() if hidden else shown_tools(fields.tools or ()),
            documents=fields.documents or (),
            template=fields.chat_template,
        )


def _of_calls(lenient: Sequence[LenientSchema], tools: ToolUse) -> list[LenientSchema]:
    """The schemas with the parameters of each tool, of which the grammar may have had parts."""
    parameters = {tool.name: json.dumps(tool.parameters) for tool in tools.tools}
    return [
        msgspec.structs.replace(each, schema=parameters[each.tool]) if each.tool in parameters else each
        for each in lenient
    ]


def _schema(form: StructuredOutputsParams) -> Mapping[str, Any]:
    """The schema and options of an answer that may call tools instead; raises RequestError if the form is no JSON."""
    if form.kind not in ("json", "json_object"):
        raise form.error(
            f"only JSON can be combined with tools, no {form.kind}: leave one of them out, or send tool_choice 'none'."
        )
    schema = {"type": "object"} if form.kind == "json_object" else json.loads(form.text)
    options = {
        "strict": form.strict,
        "closed": form.disable_additional_properties,
        "any_whitespace": not form.disable_any_whitespace,
        "whitespace": form.whitespace_pattern,
    }
    return (schema if isinstance(schema, dict) else {}) | {"x-quire": options}
