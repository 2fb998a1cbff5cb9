"""The chat templates of real model families, rebuilt: the text they come to is written down, and is the text that transformers makes.

`templates/NAME.jinja` is a template, `golden_templates.json` has by template and conversation what it comes to, or what it raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.server.template import ChatTemplates, TemplateError

HERE = Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = sorted(path.stem for path in (HERE / "templates").glob("*.jinja"))
GOLDEN: dict[str, dict[str, str | None]] = json.loads((HERE / "golden_templates.json").read_text(encoding="utf-8"))
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's <hot> & dry?",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2}}}
USER = {"role": "user", "content": " How is it? "}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [USER]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Fine.\n"}, {"role": "user", "content": "\nAnd <now> 한글?"}]},
    "a system message": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "two questions at once": {"messages": [USER, USER]},
    "a thought before": {
        "messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine."}, {"role": "user", "content": "Sure?"}]
    },
    "tools": {"messages": [{"role": "system", "content": "Be brief."}, USER], "tools": [TOOL]},
    "a call and its result": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call12345", "content": "sunny"},
        ],
        "tools": [TOOL],
    },
    "documents": {"messages": [USER], "documents": [{"title": "Weather", "text": "It rains."}]},
    "no thinking": {"messages": [USER], "more": {"enable_thinking": False}},
    "nothing to begin": {"messages": [USER, {"role": "assistant", "content": "Fine."}], "add_generation_prompt": False},
}


def ours(name: str, conversation: str) -> str | None:
    """None for what the template refuses."""
    given = {"add_generation_prompt": True, "more": {}, "tools": None, "documents": None, **CONVERSATIONS[conversation]}
    source = (HERE / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    try:
        return ChatTemplates({"default": source}, TOKENS).render(
            given["messages"],
            given["tools"],
            documents=given["documents"],
            add_generation_prompt=given["add_generation_prompt"],
            more=given["more"],
        )
    except TemplateError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_what_is_written_down(name: str) -> None:
    assert {conversation: ours(name, conversation) for conversation in CONVERSATIONS} == GOLDEN[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_what_transformers_makes(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (HERE / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    for conversation, given in CONVERSATIONS.items():
        options = {"add_generation_prompt": given.get("add_generation_prompt", True), **TOKENS, **given.get("more", {})}
        try:
            rendered, _ = utils.render_jinja_template(
                [given["messages"]], tools=given.get("tools"), documents=given.get("documents"), chat_template=source, **options
            )
            made = rendered[0]
        except Exception:
            made = None
        assert GOLDEN[name][conversation] == made, conversation


def test_there_are_templates_of_many_families_and_all_are_used() -> None:
    assert len(NAMES) >= 25 and sorted(GOLDEN) == NAMES
    assert all(any(text is not None for text in texts.values()) for texts in GOLDEN.values())


@pytest.mark.parametrize(
    ("name", "conversation", "text"),
    [
        (
            "chatml",
            "a system message",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n How is it? <|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama-2", "a system message", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n How is it? [/INST]".replace("\n\n How", "\n\n How")),
        (
            "llama-3",
            "one question",
            "<s><|start_header_id|>user<|end_header_id|>\n\nHow is it?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral-v1", "turns", "<s>[INST]  How is it?  [/INST]Fine.\n</s> [INST] \nAnd <now> 한글? [/INST]"),
        ("gemma", "one question", "<s><start_of_turn>user\nHow is it?<end_of_turn>\n<start_of_turn>model\n"),
        ("gemma-3", "a system message", "<s><start_of_turn>user\nBe brief.\n\nHow is it?<end_of_turn>\n<start_of_turn>model\n"),
        ("qwen3", "no thinking", "<|im_start|>user\n How is it? <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("phi-3", "one question", "<|user|>\n How is it? <|end|>\n<|assistant|>\n"),
        ("phi-4", "one question", "<|im_start|>user<|im_sep|> How is it? <|im_end|><|im_start|>assistant<|im_sep|>"),
        ("deepseek-r1", "a system message", "<s>Be brief.<｜User｜> How is it? <｜Assistant｜><think>\n"),
        (
            "command-r",
            "one question",
            "<s><|START_OF_TURN_TOKEN|><|USER_TOKEN|>How is it?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        ("zephyr", "one question", "<|user|>\n How is it? </s>\n<|assistant|>\n"),
    ],
)
def test_the_best_known_ones_by_hand(name: str, conversation: str, text: str) -> None:
    assert ours(name, conversation) == text


@pytest.mark.parametrize(
    ("name", "conversation"), [("gemma", "a system message"), ("mistral-v1", "two questions at once"), ("llama-2", "two questions at once")]
)
def test_what_a_template_refuses_is_refused(name: str, conversation: str) -> None:
    assert ours(name, conversation) is None
