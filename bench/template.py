"""A user's message in the form that a chat model was trained on, by the template that comes with its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forerun.bench.errors import BenchError


def chat_form(model: Path) -> Callable[[str], str]:
    """Turns a message into the model's prompt for its answer. A model without a template is given the message as it is.

    Raises BenchError for a template that cannot be used."""
    file = model / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    template = config.get("chat_template")
    if not template:
        return lambda message: message
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise BenchError("chat templates need jinja2: pip install 'forerun[cpu]'") from error
    try:
        compiled = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    except TemplateError as error:
        raise BenchError(f"the chat template of {file} cannot be used: {error}") from error
    special = {name: _text(config.get(name)) for name in ("bos_token", "eos_token")}

    def form(message: str) -> str:
        return str(compiled.render(messages=[{"role": "user", "content": message}], add_generation_prompt=True, **special))

    return form


def _text(token: Any) -> str:
    """A special token is a text, or an object with its text."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
