"""Chat templates: found where models keep them, and rendered to the same text as transformers renders them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from forerun.modelfolder import Unreadable
from forerun.server.template import ChatTemplates, TemplateError, TemplateNotFound, load_templates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
        "user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}"
        "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
        "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "tools": (
        "{%- if tools %}\n    {{- '<tools>' }}\n    {%- for tool in tools %}\n        {{- \"\\n\" }}\n        {{- tool | tojson }}\n"
        "    {%- endfor %}\n    {{- '\\n</tools>\\n' }}\n{%- endif %}\n{%- for message in messages %}\n"
        "    {%- if message.tool_calls %}\n        {%- for call in message.tool_calls %}\n"
        "            {{- call.function.name + '(' + (call.function.arguments | tojson(indent=2)) + ')' }}\n        {%- endfor %}\n"
        "    {%- elif message.role == 'tool' %}\n        {{- 'tool ' ~ message.tool_call_id ~ ': ' ~ message.content }}\n"
        "    {%- else %}\n        {{- message.role + ': ' + message.content + '\\n' }}\n    {%- endif %}\n{%- endfor %}"
    ),
    "thinking": (
        "{%- for message in messages %}{%- set ns = namespace(text=message.content) %}"
        "{%- if '</think>' in ns.text %}"
        "{%- set ns.text = ns.text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- message.role ~ ':' ~ ns.text ~ '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    ),
    "trained": (
        "{% for m in messages %}{% if loop.index > 20 %}{% break %}{% endif %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}{{ messages[-1]['content'][::-1] }}"
    ),
}
SPEECH = st.text(alphabet="ab ü<&>\"\n'{%", max_size=12)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"z": {}, "ä": {"enum": ["<&>'"]}}}}}


CALLED = {"name": "f", "arguments": {"b": 1, "a": "ä<"}}


def theirs(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **more: Any) -> str:
    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=template, **TOKENS, **more)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None)
@given(data=st.data())
def test_the_text_is_transformers(data: st.DataObject, name: str) -> None:
    turns = data.draw(st.integers(1, 4))
    messages = [{"role": ("user", "assistant")[turn % 2], "content": data.draw(SPEECH)} for turn in range(turns)]
    if data.draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": data.draw(SPEECH)})
    tools = [TOOL] if data.draw(st.booleans()) else None
    prompted = data.draw(st.booleans())
    more = {"enable_thinking": False} if data.draw(st.booleans()) else {}
    ours = ChatTemplates({"default": TEMPLATES[name]}, TOKENS).render(messages, tools, add_generation_prompt=prompted, more=more)
    assert ours == theirs(TEMPLATES[name], messages, tools, add_generation_prompt=prompted, **more)


@pytest.mark.parametrize("name", ["chatml", "llama-3", "gemma", "zephyr"])
@settings(deadline=None)
@given(text=SPEECH.filter(str.strip))
def test_what_the_assistant_has_begun_is_continued_as_in_transformers(name: str, text: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    ours = ChatTemplates({"default": TEMPLATES[name]}, TOKENS).render(messages, add_generation_prompt=False, continue_final=True)
    assert ours == theirs(TEMPLATES[name], messages, continue_final_message=True)


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "self", "context", "bos_token", "loop"])
def test_a_request_may_say_any_name(name: str) -> None:
    """`chat_template_kwargs` come from strangers: whatever they are called, they are what the template sees, but for the conversation."""
    templates = ChatTemplates({"default": "{{ messages[0].content }}{{ tools }}{{ " + name + " }}"}, TOKENS)
    told = templates.render([{"role": "user", "content": "x"}], add_generation_prompt=False, more={name: "said"})
    ours = {"messages": "[{'role': 'user', 'content': 'x'}]", "tools": "None"}
    assert told.startswith("xNone") and (name == "self" or told == "xNone" + ours.get(name, "said"))


def test_calls_and_their_results() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": "ä<"}}}],
        },
        {"role": "tool", "tool_call_id": "7", "content": "42"},
    ]
    assert ChatTemplates({"default": TEMPLATES["tools"]}).render(messages) == theirs(TEMPLATES["tools"], messages)


def test_golden() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = {name: ChatTemplates({"default": text}, TOKENS).render(messages) for name, text in TEMPLATES.items()}
    assert rendered["chatml"] == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered["llama-2"] == "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]"
    assert rendered["llama-3"] == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert rendered["zephyr"] == "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "syntax error"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ],
)
def test_what_a_template_raises_is_the_requests_error(template: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplates({"default": template}).render([{"role": "user", "content": "x"}])


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(TemplateError, match="cannot be continued"):
        ChatTemplates({"default": "no"}).render([{"role": "assistant", "content": "x"}], continue_final=True)


def test_where_templates_are_found(tmp_path: Path) -> None:
    def config(template: object) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": {"content": "B"}}))

    with pytest.raises(TemplateNotFound):
        load_templates(tmp_path).render([])
    config("{{ bos_token }}1{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "E", "bos_token": "X"}))
    assert load_templates(tmp_path).render([]) == "B1E"
    config([{"name": "default", "template": "2"}, {"name": "tool_use", "template": "2t"}])
    found = load_templates(tmp_path)
    assert (found.render([]), found.render([], [TOOL])) == ("2", "2t")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "3"}))
    assert load_templates(tmp_path).render([]) == "3"
    (tmp_path / "chat_template.jinja").write_text("4")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("4t")
    found = load_templates(tmp_path)
    assert (found.render([]), found.render([], [TOOL])) == ("4", "4t")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"chat_template": "5"}))
    assert load_templates(tmp_path, other).render([]) == "5"


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/x.jinja"],
)
@pytest.mark.parametrize(
    "content", [b"\xff\xfe{", b'{"chat_template": ', b"[" * 100_000, b"version https://git-lfs.github.com/spec/v1\n", b"", None]
)
def test_a_file_that_cannot_be_read_is_said(name: str, content: bytes | None, tmp_path: Path) -> None:
    """And not answered with another template, or none. `content`: None = of a link that leads nowhere."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "fine"}))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        (tmp_path / name).symlink_to("gone")
    else:
        (tmp_path / name).write_bytes(content)
    if name.endswith("jinja") and content is not None and content[:1] in (b"{", b"[", b""):
        assert load_templates(tmp_path)
        return
    with pytest.raises(Unreadable, match=f"{re.escape(str(tmp_path / name))}.*(fetch the model again|git lfs pull)"):
        load_templates(tmp_path)


def test_entries_that_are_no_templates_are_none(tmp_path: Path) -> None:
    entries = [
        7,
        {"name": "default"},
        {"name": 3, "template": "x"},
        {"name": "default", "template": None},
        {"name": "rag", "template": "r"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    with pytest.raises(TemplateNotFound):
        load_templates(tmp_path).render([])
