"""Chat templates render as transformers renders them, and foreign code stays in its box."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import CheckpointError, ConfigError, RequestError
from quire.text.chat_template import ChatTemplate
from quire.text.template_files import load_chat_template
from tests.checkpoints import CHATML, write_tokenizer

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- endif %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{{- ns.count }} {{ date_string }}
{%- if tools %}{% for t in tools %}
{{ t | tojson(indent=2) }}
    {%- endfor %}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
GENERATION = (
    "{% for m in messages %}\n  {% generation %}\n{{ m.content }}\n{% endgeneration %}\n"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<é> & 'q'"}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>&</b> 你好"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 "}, {"role": "user", "content": "3"}],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [CHATML, LLAMA_2, LLAMA_3, GENERATION])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(tmp_path: Path, template: str, chat: list[dict[str, Any]], prompt: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(tmp_path)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    ours = load_chat_template(tmp_path)
    assert ours is not None
    expected = reference.apply_chat_template(
        chat, chat_template=template, tools=TOOLS, add_generation_prompt=prompt, tokenize=False
    )
    assert ours.render(chat, tools=TOOLS, add_generation_prompt=prompt) == expected
    if chat[-1]["role"] == "user" and template != GENERATION and not prompt:
        expected = reference.apply_chat_template(
            chat, chat_template=template, continue_final_message=True, tokenize=False
        )
        assert ours.render(chat, add_generation_prompt=False, continue_final_message=True) == expected


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMED = {"default": PLAIN, "tool_use": "TOOLS " + PLAIN, "rag": "RAG " + PLAIN}


def write_named(directory: Path, place: str) -> None:
    """The templates of NAMED, as one generation of transformers or another keeps them."""
    write_tokenizer(directory)
    (directory / "chat_template.jinja").unlink()
    config = directory / "tokenizer_config.json"
    if place == "files":
        (directory / "chat_template.jinja").write_text(PLAIN)
        (directory / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (directory / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    elif place == "list":
        listed = [{"name": name, "template": text} for name, text in NAMED.items()]
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": listed}))
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": NAMED}))


@pytest.mark.parametrize("place", ["files", "list", "object"])
def test_named_templates_are_chosen_as_by_transformers(place: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_named(tmp_path, place)
    reference, chat = AutoTokenizer.from_pretrained(tmp_path), CHATS[0]
    template = load_chat_template(tmp_path)
    assert template is not None
    assert sorted(template.names) == sorted(NAMED)
    for tools, name in ((None, None), (TOOLS, None), (None, "rag"), (TOOLS, "rag"), (TOOLS, "default")):
        expected = reference.apply_chat_template(chat, tools=tools, chat_template=name, tokenize=False)
        chosen = template.with_tools() if tools and name is None else template.replaced(name) if name else template
        assert chosen.render(chat, tools=tools) == expected, (tools, name)
    for name in NAMED:
        named = load_chat_template(tmp_path, name)
        assert named is not None
        assert named.with_tools().source == NAMED[name]


def test_a_name_that_no_template_has_is_said(tmp_path: Path) -> None:
    write_named(tmp_path, "files")
    with pytest.raises(ConfigError, match=r"nor one of the model's \(default, rag, tool_use\)"):
        load_chat_template(tmp_path, "tools")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="named rag, tool_use, and none is the default"):
        load_chat_template(tmp_path)
    assert load_chat_template(tmp_path, "rag") is not None
    (tmp_path / "additional_chat_templates" / "rag.jinja").unlink()
    assert load_chat_template(tmp_path) is not None


def test_a_template_may_stand_in_five_places(tmp_path: Path) -> None:
    def found(override: str | None = None) -> str:
        template = load_chat_template(tmp_path, override)
        return template.source if template else ""

    assert found() == ""
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "string"}))
    assert found() == "string"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert found() == "default"
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "processor"}))
    assert found() == "processor"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert found() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert found() == "jinja"
    (tmp_path / "mine").write_text("mine")
    assert found(str(tmp_path / "mine")) == "mine"
    assert found("{{ text }}") == "{{ text }}"
    with pytest.raises(ConfigError, match="--chat-template"):
        found(str(tmp_path / "missing"))


def test_only_variables_that_the_template_reads_can_be_set() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}{{ bos_token }}")
    assert template.variables == {"enable_thinking"}
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages, variables={"enable_thinking": True}) == "a<think>"
    for name in ("tokenize", "messages", "bos_token", "raise_exception", "range"):
        with pytest.raises(RequestError, match=f"'{name}'.*enable_thinking"):
            template.render(messages, variables={name: []})


def test_a_template_that_refuses_is_quoted() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate(LLAMA_2).render([{"role": "assistant", "content": "a"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].environ }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(1000) %}{% for b in range(900) %}" + "x" * 100 + "{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ missing.field.field }}",
        "{% include 'etc/passwd' %}",
    ],
)
def test_hostile_templates_fail_alone(source: str) -> None:
    shown = ""  # a sandbox may also show nothing
    try:
        shown = ChatTemplate(source).render([{"role": "user", "content": "a"}])
    except (RequestError, CheckpointError) as error:
        refusal = error.message
    else:
        refusal = ""
    assert shown == ""
    assert "Traceback" not in refusal
    assert "/" not in refusal.replace("'etc/passwd'", "")


@pytest.mark.parametrize("source", ["{{", "{% for %}", "{% unknown %}", "(" * 10 + "{{ " + "(" * 5000])
def test_a_broken_template_is_said_at_start(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source)


def test_continuing_needs_a_text_and_no_generation_prompt() -> None:
    template = ChatTemplate(CHATML)
    with pytest.raises(RequestError, match="exclude"):
        template.render(CHATS[0], continue_final_message=True)
    with pytest.raises(RequestError, match="last message"):
        template.render([], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(RequestError, match="does not show"):
        ChatTemplate("x").render(CHATS[0], continue_final_message=True, add_generation_prompt=False)
