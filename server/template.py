"""Chat templates: from messages to the prompt that the model was trained on, rendered as transformers renders it.

Owns where a model's templates lie, the sandbox they run in, and the names they may use. A template is a program that came with the
model: it runs in jinja's immutable sandbox, sees plain data only, and what it raises is the request's own error. Knows no HTTP.

Found in this order, the first wins: `chat_template.jinja` (named ones in `additional_chat_templates/`), `chat_template.json`,
`chat_template` in tokenizer_config.json, one text or a list of named ones.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from forerun.modelfolder import object_of, text_of

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""names of tokenizer_config.json that templates see"""
_MARK = "\ue000continue\ue000"
"""stands behind the text to be continued while the template runs, with a space behind itself that tells whether the template trims its
messages; from the private use area, so that no message holds it by chance"""

Message = dict[str, Any]


class TemplateError(Exception):
    """A conversation that the template does not render. The message is what the template said."""


class TemplateNotFound(TemplateError):
    """The model has no template of this name, or none at all."""


class ChatTemplates:
    """The templates of one model. `named`: their sources; the one without another name is `default`. `tokens`: special tokens by name."""

    def __init__(self, named: Mapping[str, str], tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = dict(tokens or {})
        self._environment = _environment()
        self._sources = dict(named)
        self._compiled: dict[str, jinja2.Template] = {}
        self._read: dict[str, set[str]] = {}
        """by template: the variables it looks at"""

    def __bool__(self) -> bool:
        return bool(self._sources)

    def source(self, tools: bool) -> str:
        """The template that a conversation is rendered with. Raises TemplateNotFound."""
        return self._sources[self._name(tools)]

    def reads(self, variable: str, tools: bool) -> bool:
        """Whether the template looks at this variable at all."""
        name = self._name(tools)
        if name not in self._read:
            try:
                self._read[name] = jinja2.meta.find_undeclared_variables(self._environment.parse(self._sources[name]))
            except jinja2.TemplateSyntaxError as wrong:
                raise TemplateError(f"syntax error: {wrong}") from None
        return variable in self._read[name]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        documents: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final`: it ends inside the last message, whose text the model is to go on with. `more`: what else the
        template may look at (`enable_thinking` …). Raises TemplateError."""
        template = self._template(self._name(bool(tools)))
        shown = list(messages)
        if continue_final:
            text = shown[-1].get("content") if shown else None
            if not isinstance(text, str):
                raise TemplateError("the last message has no text to continue")
            shown[-1] = {**shown[-1], "content": text + _MARK + " "}
        given = {"documents": documents, "add_generation_prompt": add_generation_prompt}
        names = {**self._tokens, **given, **(more or {}), "messages": shown, "tools": list(tools) if tools else None}
        try:
            prompt = template.render(names)
        except jinja2.TemplateSyntaxError as wrong:
            raise TemplateError(f"syntax error: {wrong}") from None
        except jinja2.TemplateError as wrong:
            raise TemplateError(str(wrong)) from None
        except RecursionError:
            raise TemplateError("the conversation is nested too deeply") from None
        except Exception as wrong:  # a template may stumble over anything that a message holds
            raise TemplateError(f"{type(wrong).__name__}: {wrong}") from None
        return _upto_mark(prompt) if continue_final else prompt

    def _name(self, tools: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise TemplateNotFound("template not found")
        return name

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as wrong:
                raise TemplateError(f"syntax error: {wrong}") from None
        return self._compiled[name]


def load_templates(folder: Path, config_path: Path | None = None) -> ChatTemplates:
    """The templates of a model folder. `config_path`: a tokenizer_config.json that takes the place of the folder's own. Raises
    modelfolder.Unreadable for a file that is there and cannot be read."""
    config = object_of(config_path or folder / "tokenizer_config.json")
    given = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in given if isinstance(entry, dict)]
        named |= {name: template for name, template in pairs if isinstance(name, str) and isinstance(template, str)}
    if config_path is None:
        apart = object_of(folder / "chat_template.json").get("chat_template")
        if isinstance(apart, str):
            named["default"] = apart
        for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
            named[path.stem] = text_of(path) or ""
        alone = text_of(folder / "chat_template.jinja")
        if alone is not None:
            named["default"] = alone
    return ChatTemplates(named, _special(config, object_of(folder / "special_tokens_map.json")))


def _special(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _upto_mark(prompt: str) -> str:
    """The prompt as far as the marked text goes, trimmed if the template trims."""
    before, found, behind = prompt.rpartition(_MARK)
    if not found:
        raise TemplateError("the template leaves out the last message, so it cannot be continued")
    return before if behind.startswith(" ") else before.rstrip()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja's escapes for HTML, in the order given."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
