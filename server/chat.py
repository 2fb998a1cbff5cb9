"""A chat request becomes a prompt: messages, tools and template. Decides what is asked of the model; sends nothing.

Messages go to the template as OpenAI's clients send them, with two changes that templates are written for: content in parts is put
together, and the arguments of earlier calls are objects, not JSON inside a string. Raises ApiError: 422 with TGI's types
`template_error` and `tool_error`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from forerun.server.dialects import ARGS, JSON, Dialect, dialect_of
from forerun.server.errors import ApiError, malformed
from forerun.server.openai_schema import ChatRequest, Message, Part, Tool, ToolCall
from forerun.server.reading import THINK, THOUGHT, Reader, thinks
from forerun.server.template import ChatTemplates, TemplateError

_SHAPE = "Failed to deserialize the JSON body into the target type: "
DEFAULT_TOOL_PROMPT = (
    "Given the functions available, answer with a JSON object for a call of the one that fits best, in the form "
    '{"name": name of the function, "parameters": {name of an argument: its value}}. Do not use variables. '
    "Answer in words if none of them fits."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """`dialect`: how calls are written, None = there are no tools. `inside`: the prompt has opened the thoughts. `forced`: tools of which
    one must be called; `named`: whether the template writes their names before their arguments. `single`: no more than one call."""

    text: str
    dialect: Dialect | None
    thinking: bool
    inside: bool
    forced: Sequence[Tool] = ()
    named: bool = False
    single: bool = False

    def reader(self) -> Reader:
        return Reader(self.dialect, self.thinking, self.inside, self.single)

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the reader must see."""
        seen = self.dialect.special if self.dialect else frozenset()
        return seen | {THINK, THOUGHT} if self.thinking else seen


def template_error(message: str) -> ApiError:
    return ApiError(422, f"Template error: {message}", "template_error", label="template")


def tool_error(message: str) -> ApiError:
    return ApiError(422, f"Tool error: {message}", "tool_error", label="validation")


def prompt_of(body: ChatRequest, templates: ChatTemplates) -> Prompt:
    """The prompt of a conversation as it is."""
    tools = offered(body)
    try:
        return _rendered(body, body.messages, tools, templates)
    except TemplateError as wrong:
        raise template_error(str(wrong)) from wrong


def shortened(body: ChatRequest, templates: ChatTemplates, fits: Callable[[str], bool]) -> Prompt:
    """The prompt with as few messages left out as it takes to fit; system messages and the last one stay. As it is, if that is not enough:
    then validation says what is wrong. Found by halving: a conversation of n messages is rendered about 2·log n times."""
    tools = offered(body)
    free = [place for place, message in enumerate(body.messages[:-1]) if message.role not in ("system", "developer")]
    outwards = sorted(range(len(free)), key=lambda place: (abs(2 * place - len(free) + 1), -place))
    order = free if body.truncate == "oldest" else [free[place] for place in outwards]

    def exactly_without(count: int) -> Prompt:
        gone = set(order[:count])
        return _rendered(body, [message for place, message in enumerate(body.messages) if place not in gone], tools, templates)

    def without(count: int) -> Prompt:
        """One more is left out where the roles must take turns and would not."""
        try:
            return exactly_without(count)
        except TemplateError:
            if not 0 < count < len(order):
                raise
            return exactly_without(count + 1)

    try:
        whole = without(0)
        if fits(whole.text) or not order or not fits((shortest := without(len(order))).text):
            return whole
        too_few, enough = 0, len(order)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            prompt = without(middle)
            if fits(prompt.text):
                enough, shortest = middle, prompt
            else:
                too_few = middle
        return shortest
    except TemplateError as wrong:
        raise template_error(str(wrong)) from wrong


def offered(body: ChatRequest) -> list[Tool]:
    """The tools that the model may call."""
    tools, choice = body.tools or [], body.tool_choice
    if body.tools is not None and body.response_format is not None and body.response_format.type != "text":
        raise tool_error("Grammar and tools are mutually exclusive")
    if choice == "none" or not tools:
        return []
    if choice is None or choice == "auto":
        return tools
    if choice == "required":
        return tools
    name = choice if isinstance(choice, str) else choice.function.name
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise tool_error(f"Tool with name {name} not found")
    return named


def _rendered(body: ChatRequest, messages: Sequence[Message], tools: list[Tool], templates: ChatTemplates) -> Prompt:
    source = templates.source(bool(tools))
    shown = [_plain(message, "developer" in source) for message in messages]
    going_on = _continues(body)
    knows = bool(tools) and templates.reads("tools", True)
    if tools and not knows:
        shown = _told(shown, tools, body.tool_prompt)
    text = templates.render(
        shown,
        [_signature(tool) for tool in tools] if knows else None,
        documents=body.documents,
        add_generation_prompt=not going_on if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final=going_on,
        more=body.chat_template_kwargs,
    )
    dialect = (dialect_of(source) if knows else JSON) if tools else None
    forced = tools if body.tool_choice not in (None, "auto") else ()
    return Prompt(text, dialect, thinks(source), text.rstrip().endswith(THINK), forced, ARGS in source, body.parallel_tool_calls is False)


def _continues(body: ChatRequest) -> bool:
    """As in TGI: what the assistant has begun, it goes on with."""
    last = body.messages[-1] if body.messages else None
    if body.continue_final_message is not None:
        return body.continue_final_message
    return (
        last is not None
        and last.role == "assistant"
        and last.content is not None
        and not last.tool_calls
        and not body.add_generation_prompt
    )


def _plain(message: Message, developers: bool) -> dict[str, Any]:
    """`developers`: the template knows that role; to others OpenAI's newer name of a system message is shown as one."""
    if message.content is None and message.tool_calls is None:
        raise malformed(422, f"{_SHAPE}messages: data did not match any variant of untagged enum MessageBody")
    role = "system" if message.role == "developer" and not developers else message.role
    shown: dict[str, Any] = {"role": role, "content": _text(message.content)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if message.tool_calls:
        shown["tool_calls"] = [_called(call) for call in message.tool_calls]
    return shown


def _text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "refusal") or part.shown is None:
            raise ApiError(
                422,
                f"Input validation error: this model reads text only; a part of type {part.type!r} is none",
                "validation",
                label="validation",
            )
    return "".join(part.shown or "" for part in content)


def _called(call: ToolCall) -> dict[str, Any]:
    function = call.function
    given = function.arguments if function.arguments is not None else function.parameters
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON, or no text any more, is shown as it was written
            meant = json.loads(given) if given.strip() else {}
            json.dumps(meant, ensure_ascii=False, allow_nan=False).encode()
            given = meant
    made: dict[str, Any] = {"type": call.type, "function": {"name": function.name, "arguments": {} if given is None else given}}
    return {"id": call.id, **made} if call.id is not None else made


def _signature(tool: Tool) -> dict[str, Any]:
    """As OpenAI's clients send it, which templates are written for."""
    function = tool.function
    parameters = function.parameters if function.parameters is not None else function.arguments
    made: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        made["description"] = function.description
    made["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": tool.type, "function": made}


def _told(shown: list[dict[str, Any]], tools: list[Tool], words: str | None) -> list[dict[str, Any]]:
    """For a template that does not know tools: they are named in the last message, as in TGI."""
    if not shown or "tool_calls" in shown[-1]:
        return shown
    try:
        listed = msgspec.json.encode([_signature(tool) for tool in tools]).decode()
    except RecursionError:
        raise TemplateError("a tool is nested too deeply") from None
    last = {**shown[-1], "content": f"{shown[-1]['content']}\n---\n{listed}\n{words or DEFAULT_TOOL_PROMPT}"}
    return [*shown[:-1], last]
