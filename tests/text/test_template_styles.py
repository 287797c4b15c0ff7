"""Conversations as clients send them, on the styles of templates that models have: what transformers renders counts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import RequestError
from quire.text.chat_template import ChatTemplate
from tests.checkpoints import write_tokenizer

LLAMA = (
    "{% if messages[0].role == 'system' %}{{ '[system]' + messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('Only one call at a time.') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    """{{ '[assistant]{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}"""
    "{% else %}{{ '[' + m.role + ']' + m['content'] | trim }}{% endif %}{% endfor %}"
)
QWEN_2 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{ '[' + m.role + ']' + m.content }}"
    "{% elif m.role == 'assistant' %}[assistant]{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{% if c.function %}{% set c = c.function %}{% endif %}"
    """{{ '<tool_call>{"name": "' + c.name + '", "arguments": ' }}{{ c.arguments | tojson }}}</tool_call>{% endfor %}"""
    "{% elif m.role == 'tool' %}{{ '[tool]' + m.content }}{% endif %}{% endfor %}{% if tools %}{% endif %}"
)
QWEN_3 = (
    "{% if messages[0].role == 'system' %}{{ '[system]' + messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '[' + m.role + ']' + m.content }}{% elif m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in m.content %}{% set content = m.content.split('</think>')[-1] %}{% endif %}"
    "{{ '[assistant]' + content }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    "{{ c.function.name }}{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}</tool_call>{% endfor %}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '[tool]' + m.content }}{% endif %}{% endfor %}{% if tools %}{% endif %}"
)
QWEN_3_CODER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor %}"
    "</function>{% endfor %}{% endfor %}{% if tools %}{% endif %}"
)
QWEN_3_5 = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% set ns = namespace(index=0) %}"
    "{% for m in rest %}{% if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}{{ bos_token }}{% if tools %}[TOOLS]{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST]{% if loop.last and system is defined %}"
    "{{ system + '\n\n' }}{% endif %}{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ c.function | tojson }}{{ c.id }}{% endfor %}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}{{ m.tool_call_id }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
HERMES = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls is defined %}[assistant]"
    "{% for c in m.tool_calls %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}{% if tools %}{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content | trim }}{% endfor %}"
)
DEEPSEEK_R1 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<User>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    "{{ '<call>' + c['type'] + c['function']['name'] + '```json' + c['function']['arguments'] + '```' }}{% endfor %}"
    "{% endif %}{% if m['role'] == 'assistant' and m['content'] is not none %}"
    "{{ '<Assistant>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ '<output>' + m['content'] }}{% endif %}{% endfor %}{% if tools %}{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% if 'content' in m and '<|channel|>' in m.content %}{{ raise_exception('No channels in content.') }}{% endif %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Not both content and thinking.') }}{% endif %}"
    "{{ '[analysis]' + (m.content or m.thinking or '') }}{% set call = m.tool_calls[0].function %}"
    "{{ '[' + call.name + ']' + call.arguments | tojson }}"
    "{% elif m.role == 'tool' %}{{ '[result]' + m.content | tojson }}"
    "{% elif m.role in ['user', 'assistant'] %}{{ '[' + m.role + ']' + m.content }}{% endif %}{% endfor %}"
    "{% if tools %}{% endif %}"
)
PRINTED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<function={{ c.function.name }}>{{ c.function.arguments }}</function>{% endfor %}{% endfor %}"
    "{% if tools %}{% endif %}"
)

ARGUMENTS = '{"city":"Zürich","days":2}'
CALL = {"id": "aB3dE6gH9", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "tool_call_id": "aB3dE6gH9", "content": "20 degrees"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)  # type: ignore[no-any-return]


def ours(template: str, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> str:
    special = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
    return ChatTemplate(template, special).render(messages, add_generation_prompt=False, **options)


def theirs(template: str, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> str:
    """`render_jinja_template` is what apply_chat_template renders with once it has taken nulls out of messages."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    rendered: Any = render_jinja_template([messages], chat_template=template, **special, **options)
    text: str = rendered[0][0]
    return text


@pytest.mark.parametrize(
    ("template", "content", "objects"),
    [
        pytest.param(LLAMA, None, True, id="llama"),
        pytest.param(QWEN_2, None, True, id="qwen 2"),
        pytest.param(QWEN_3, "", True, id="qwen 3"),
        pytest.param(QWEN_3_CODER, None, True, id="qwen 3 coder"),
        pytest.param(MISTRAL, None, True, id="mistral"),
        pytest.param(HERMES, None, True, id="hermes"),
        pytest.param(DEEPSEEK_R1, None, False, id="deepseek r1"),
        pytest.param(GPT_OSS, "", True, id="gpt-oss"),
        pytest.param(PRINTED, "", False, id="printed"),
    ],
)
@pytest.mark.parametrize("sent", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "absent"])
def test_calls_are_shown_as_transformers_shows_them(
    tokenizer: PreTrainedTokenizerFast, template: str, content: str | None, objects: bool, sent: dict[str, Any]
) -> None:
    """`content` and `objects`: what the template takes; all of these templates take what clients send one way."""
    arguments = json.loads(ARGUMENTS) if objects else ARGUMENTS
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    taken = [ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}, RESULT]
    expected = theirs(template, tokenizer, taken, tools=TOOLS)
    assert "Zürich" in expected
    assert "None" not in expected
    messages = [ASKED, {"role": "assistant", **sent, "tool_calls": [CALL], "refusal": None}, RESULT]
    assert ours(template, tokenizer, messages, tools=TOOLS) == expected


def test_text_beside_calls_and_answers_without_text_stay(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}}
    said = [ASKED, {"role": "assistant", "content": "I look.", "tool_calls": [call]}, RESULT]
    sent = [ASKED, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}, RESULT]
    assert ours(QWEN_2, tokenizer, sent, tools=TOOLS) == theirs(QWEN_2, tokenizer, said, tools=TOOLS)
    for nothing in ({"content": None, "tool_calls": None}, {"content": "", "tool_calls": []}):
        for template in (LLAMA, QWEN_2, QWEN_3, DEEPSEEK_R1):
            taken = [ASKED, {"role": "assistant", "content": ""}, ASKED]
            sent = [ASKED, {"role": "assistant", **nothing}, ASKED]
            assert ours(template, tokenizer, sent) == theirs(template, tokenizer, taken)


def test_arguments_that_are_no_json_are_shown_as_they_were(tokenizer: PreTrainedTokenizerFast) -> None:
    for template in (LLAMA, DEEPSEEK_R1):
        for arguments in ('{"city": ', '{"city": "\\ud800"}'):
            broken = {**CALL, "function": {"name": "weather", "arguments": arguments}}
            sent = [ASKED, {"role": "assistant", "content": None, "tool_calls": [broken]}, RESULT]
            assert ours(template, tokenizer, sent, tools=TOOLS) == theirs(template, tokenizer, sent, tools=TOOLS)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_seen_by_whichever_name_it_has(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """transformers gives templates two names, from any of three."""
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], name: "hm"}
    assert "[analysis]hm" in ours(GPT_OSS, tokenizer, [ASKED, called, RESULT], tools=TOOLS)
    assert "[analysis]ok" in ours(GPT_OSS, tokenizer, [ASKED, {**called, "content": "ok"}, RESULT], tools=TOOLS)
    deepseek = "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
    assert ours(deepseek, tokenizer, [ASKED, {"role": "assistant", "content": "ok", name: "hm"}]) == "Weather?hmok"


def test_ids_of_other_apis_fit_a_template_that_wants_nine_letters(tokenizer: PreTrainedTokenizerFast) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "call_0123456789abcdef"}]}
    text = ours(MISTRAL, tokenizer, [ASKED, called, {**RESULT, "tool_call_id": "call_0123456789abcdef"}], tools=TOOLS)
    shown = text.partition("[RESULT]20 degrees")[2]
    assert (len(shown), text.count(shown)) == (9, 2)
    printed = QWEN_3_5.replace("{% endfor %}", "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endfor %}")
    kept = ours(printed, tokenizer, [ASKED, {**called, "content": "a"}, *turns("u1", "s2")])
    assert kept == "[user]Weather?[assistant]acall_0123456789abcdef[user]1\n\n2"


def turns(*said: str) -> list[dict[str, Any]]:
    """Turns whose role is their first letter."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text[1:]} for text in said]


ARRANGED = {
    "system last": ("s1", "u2", "s3"),
    "system in the middle": ("s1", "u2", "a3", "s4", "u5"),
    "system behind the first": ("s1", "s2", "u3"),
    "system never first": ("u1", "s2"),
    "system behind an answer": ("s1", "u2", "a3", "s4"),
    "system between answers": ("s1", "u2", "a3", "s4", "a5", "u6"),
    "developer": ("d1", "u2", "d3"),
    "both": ("s1", "d2", "u3"),
    "users in a row": ("s1", "u2", "u3", "a4", "u5"),
    "only system": ("s1", "s2"),
}


@pytest.mark.parametrize("name", ARRANGED)
@pytest.mark.parametrize(
    "template", [LLAMA, QWEN_2, QWEN_3, QWEN_3_5, MISTRAL, GEMMA, DEEPSEEK_R1],
    ids=["llama", "qwen 2", "qwen 3", "qwen 3.5", "mistral", "gemma", "deepseek r1"],
)  # fmt: skip
def test_every_template_shows_all_turns(tokenizer: PreTrainedTokenizerFast, template: str, name: str) -> None:
    """As they were sent, where transformers can."""
    if name == "only system" and template == MISTRAL:
        return  # shows the system's text in a user's turn only
    messages = turns(*(text[0] + "said" + text[1:] for text in ARRANGED[name]))
    text = ours(template, tokenizer, messages)
    assert all(message["content"] in text for message in messages)
    as_sent = [{**message, "role": message["role"].replace("developer", "system")} for message in messages]
    try:
        expected = theirs(template, tokenizer, as_sent)
    except Exception:  # jinja's, as the template raises them
        return
    if all(message["content"] in expected for message in messages):
        assert text == expected


@pytest.mark.parametrize(
    ("template", "sent", "taken"),
    [
        (QWEN_3_5, ("s1", "u2", "s3"), ("s1", "u2\n\n3")),
        (QWEN_3_5, ("s1", "u2", "a3", "s4", "u5"), ("s1", "u2", "a3", "u4\n\n5")),
        (QWEN_3_5, ("s1", "s2", "u3"), ("s1\n\n2", "u3")),
        (QWEN_3_5, ("s1", "u2", "a3", "s4"), ("s1", "u2", "a3", "u4")),
        (QWEN_3_5, ("s1", "u2", "s3", "s4", "a5"), ("s1", "u2\n\n3\n\n4", "a5")),
        (MISTRAL, ("u1", "u2", "a3", "a4", "u5"), ("u1\n\n2", "a3\n\n4", "u5")),
        (MISTRAL, ("s1", "u2", "a3", "s4", "a5", "u6"), ("s1", "u2", "a3", "u4", "a5", "u6")),
        (GEMMA, ("s1", "u2", "a3", "s4", "u5"), ("u1\n\n4\n\n2", "a3", "u5")),
        (GEMMA, ("d1", "u2"), ("u1\n\n2",)),
        (DEEPSEEK_R1, ("s1", "s2", "u3"), ("s1\n\n2", "u3")),
    ],
)
def test_what_a_template_refuses_or_passes_over_is_arranged_anew(
    tokenizer: PreTrainedTokenizerFast, template: str, sent: tuple[str, ...], taken: tuple[str, ...]
) -> None:
    expected = theirs(template, tokenizer, turns(*taken))
    assert ours(template, tokenizer, turns(*sent)) == expected
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns(*sent)]
    over_parts = template.replace("m.content", "(m.content | map(attribute='text') | join)")
    if template == QWEN_3_5:
        assert ours(over_parts, tokenizer, parts) == expected


def test_a_conversation_that_no_arrangement_helps_is_refused_in_the_templates_words(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ours(MISTRAL, tokenizer, turns("a1", "u2"))
    with pytest.raises(RequestError, match="at the beginning"):
        ours(QWEN_3_5, tokenizer, turns("s1", "u2", "s3"), continue_final_message=True)
    continued = ours(MISTRAL, tokenizer, turns("u1", "u2", "a3"), continue_final_message=True)
    assert continued.endswith("[/INST]3")


@pytest.mark.parametrize("role", ["user", "system"])
def test_the_time_to_arrange_is_linear_in_the_turns(role: str) -> None:
    """Joined one after the other, these took 80 GB of copies; looked for from the beginning, half a minute."""
    said = [f"{i:05}" + "x" * 2_000 for i in range(4_000)]
    sent = [{"role": "user", "content": "go"}, *({"role": role, "content": text} for text in said)]
    begun = time.thread_time()
    text = ChatTemplate(GEMMA).render(sent, add_generation_prompt=True)
    assert time.thread_time() - begun < 3.0
    assert "\n\n".join(said) in text
