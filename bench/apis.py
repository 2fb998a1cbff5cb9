"""The request and event forms of the servers that can be measured. A server is a row of `APIS`; the load generator knows none.

Events are read with msgspec into structs that have only the fields that matter: about a microsecond each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What is asked with every prompt. `prompt_tokens`: cut the prompt to its last so many tokens (only where the API can; 0 = leave
    it). `extra`: further members, merged into `parameters` (tgi) or the body (the others)."""

    max_new_tokens: int
    model: str = "tgi"
    temperature: float = 0.0
    seed: int | None = None
    prompt_tokens: int = 0
    ignore_eos: bool = False
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Reading:
    """What one event says. `tokens`: new ones; `total`: all tokens of the answer so far, where the server tells (it then overrides the
    count of events); `error`: the server's own words; `id`: of the new token, where the server tells it; `guesses`: (drafted, accepted,
    steps) of the whole answer, where it tells that."""

    tokens: int = 0
    total: int | None = None
    error: str = ""
    done: bool = False
    id: int | None = None
    guesses: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Api:
    """`body`: (prompt, ask) → the request's JSON; `read`: the data of an event (or the whole body, when not `streamed`) → what it says.
    Raises msgspec.DecodeError for what is not JSON of the expected form."""

    path: str
    body: Callable[[str, Ask], dict[str, Any]]
    read: Callable[[bytes], Reading]
    streamed: bool = True


class _Speculation(msgspec.Struct):
    drafted: int = 0
    accepted: int = 0
    steps: int = 0


class _TgiDetails(msgspec.Struct):
    generated_tokens: int = 0
    speculation: _Speculation | None = None


class _TgiToken(msgspec.Struct):
    id: int


class _TgiEvent(msgspec.Struct):
    token: _TgiToken | None = None
    generated_text: str | None = None
    details: _TgiDetails | None = None
    error: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None


class _OpenAiEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _LlamaEvent(msgspec.Struct):
    content: str = ""
    stop: bool = False
    tokens_predicted: int | None = None
    error: Any = None


_tgi = msgspec.json.Decoder(_TgiEvent)
_openai = msgspec.json.Decoder(_OpenAiEvent)
_llama = msgspec.json.Decoder(_LlamaEvent)


def _read_tgi(data: bytes) -> Reading:
    event = _tgi.decode(data)
    if event.error is not None:
        return Reading(error=event.error, done=True)
    details, token = event.details, event.token
    reading = Reading(tokens=int(token is not None), done=event.generated_text is not None, id=token.id if token else None)
    if details:
        reading.total = details.generated_tokens
    if details and details.speculation:
        reading.guesses = (details.speculation.drafted, details.speculation.accepted, details.speculation.steps)
    return reading


def _read_openai(data: bytes) -> Reading:
    if data == b"[DONE]":
        return Reading(done=True)
    event = _openai.decode(data)
    if event.error is not None:
        return Reading(error=str(event.error), done=True)
    spoke = any(choice.text or (choice.delta or {}).get("content") for choice in event.choices)
    return Reading(tokens=int(spoke), total=event.usage.completion_tokens if event.usage else None)


def _read_llama(data: bytes) -> Reading:
    event = _llama.decode(data)
    if event.error is not None:
        return Reading(error=str(event.error), done=True)
    total = event.tokens_predicted if event.stop else None
    return Reading(tokens=int(bool(event.content)), total=total, done=event.stop)


def _tgi_parameters(ask: Ask) -> dict[str, Any]:
    if ask.ignore_eos:
        raise ValueError("TGI's API has no way to ignore the end of text: leave --ignore-eos out, or measure the server's OpenAI routes")
    sampled = ask.temperature > 0
    parameters: dict[str, Any] = {"max_new_tokens": ask.max_new_tokens, "do_sample": sampled}
    if sampled:
        parameters["temperature"] = ask.temperature
    if ask.seed is not None:
        parameters["seed"] = ask.seed
    if ask.prompt_tokens:
        parameters["truncate"] = ask.prompt_tokens
    return parameters | ask.extra


def _tgi_body(prompt: str, ask: Ask) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": _tgi_parameters(ask)}


def _tgi_whole_body(prompt: str, ask: Ask) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": _tgi_parameters(ask) | {"details": True}}


def _openai_common(ask: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": ask.model,
        "max_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.seed is not None:
        body["seed"] = ask.seed
    if ask.ignore_eos:
        body["ignore_eos"] = True
    return body | ask.extra


def _completion_body(prompt: str, ask: Ask) -> dict[str, Any]:
    return {"prompt": prompt} | _openai_common(ask)


def _chat_body(prompt: str, ask: Ask) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} | _openai_common(ask)


def _llama_body(prompt: str, ask: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": ask.max_new_tokens,
        "temperature": ask.temperature,
        "stream": True,
        "cache_prompt": False,
        "ignore_eos": ask.ignore_eos,
    }
    if ask.seed is not None:
        body["seed"] = ask.seed
    return body | ask.extra


APIS: dict[str, Api] = {
    "tgi": Api("/generate_stream", _tgi_body, _read_tgi),
    "tgi-whole": Api("/generate", _tgi_whole_body, _read_tgi, streamed=False),
    "openai": Api("/v1/completions", _completion_body, _read_openai),
    "openai-chat": Api("/v1/chat/completions", _chat_body, _read_openai),
    "llama": Api("/completion", _llama_body, _read_llama),
}
