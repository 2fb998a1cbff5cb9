"""What `/v1` says: chat and completion answers, whole and streamed, in OpenAI's shapes with TGI's order of keys.

One text has one reading, so a stream and a whole answer say the same. Knows no socket and asks nobody for anything.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from forerun.router.request import Run
from forerun.server import openai_schema as shape
from forerun.server.answer import Collector
from forerun.server.errors import ApiError
from forerun.server.openai_schema import ChatFinish, Delta, DeltaCall, MadeCall, MadeFunction, Usage
from forerun.server.reading import Call, Reader
from forerun.server.schema import FinishReason, Origin, Token
from forerun.server.transcript import Transcript, Vocabulary

_encode = msgspec.json.Encoder().encode
DONE = b"[DONE]"
_REASONS: dict[FinishReason, ChatFinish] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of a response have in common. `prompt_tokens`: of all its prompts."""

    id: str
    created: int
    model: str
    fingerprint: str
    prompt_tokens: int

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}

    def usage(self, transcripts: Sequence[Transcript]) -> Usage:
        generated = sum(transcript.generated for transcript in transcripts)
        return Usage(self.prompt_tokens, generated, self.prompt_tokens + generated)


class ChatVoice:
    """One answer of a chat stream. A chunk a token; what may become a call or the end of a thought waits until it is clear."""

    def __init__(self, head: Head, index: int, reader: Reader, vocabulary: Vocabulary, logprobs: bool, origins: bool) -> None:
        self._origins = origins
        self._head = head
        self._index = index
        self._reader = reader
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._calls = 0

    def say(self, said: list[Token], run: Run, transcript: Transcript) -> list[bytes]:
        events: list[bytes] = []
        for i, token in enumerate(said):
            last = transcript.finish if token is said[-1] else None
            deltas = self._deltas(token.text, bool(last))
            likely = None
            if self._logprobs:
                others = transcript.alternatives(run.top[i]) if run.top else []
                likely = shape.Logprobs([logprob_of(self._vocabulary, token, others)])
            if not deltas and (likely or last):
                deltas = [Delta("assistant", "")]
            for place, delta in enumerate(deltas):
                finish = self._finish(last) if last and place == len(deltas) - 1 else None
                origin = transcript.origin(i, run) if self._origins else UNSET
                events.append(self._chunk(delta, likely if place == 0 else None, finish, origin))
        return events

    def _deltas(self, text: str, last: bool) -> list[Delta]:
        found: list[Delta] = []
        for piece in (*self._reader.push(text), *(self._reader.finish() if last else ())):
            if piece.call is not None:
                found += self._call(piece.call)
            elif piece.kind == "thought":
                found.append(Delta("assistant", reasoning_content=piece.text))
            else:
                found.append(Delta("assistant", piece.text))
        return found

    def _call(self, call: Call) -> list[Delta]:
        """As OpenAI streams one: its name, then its arguments."""
        index, self._calls = self._calls, self._calls + 1
        begun = DeltaCall(index, MadeFunction("", call.name), id=call_id(), type="function")
        return [Delta("assistant", tool_calls=[begun]), Delta("assistant", tool_calls=[DeltaCall(index, MadeFunction(call.arguments))])]

    def _finish(self, reason: FinishReason) -> ChatFinish:
        return "tool_calls" if self._calls and reason != "length" else _REASONS[reason]

    def _chunk(self, delta: Delta, likely: shape.Logprobs | None, finish: ChatFinish | None, origin: Origin | UnsetType) -> bytes:
        head = self._head
        choice = shape.ChunkChoice(self._index, delta, likely, finish, origin)
        return _encode(shape.ChatChunk(head.id, head.created, head.model, head.fingerprint, [choice]))


class TextVoice:
    """One answer of a completion stream. `echo`: the prompt, said first. `prompt_tokens`: for the usage that TGI puts into the last chunk
    of each prompt; None where one more chunk tells that of all of them."""

    def __init__(self, head: Head, index: int, vocabulary: Vocabulary, logprobs: bool, echo: str, prompt_tokens: int | None) -> None:
        self._head = head
        self._index = index
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._before = echo
        self._offset = len(echo)
        self._prompt_tokens = prompt_tokens

    def say(self, said: list[Token], run: Run, transcript: Transcript) -> list[bytes]:
        events: list[bytes] = []
        for i, token in enumerate(said):
            last = transcript.finish if token is said[-1] else None
            if not (token.text or last or self._logprobs):
                continue
            likely = None
            if self._logprobs:
                others = [transcript.alternatives(run.top[i])] if run.top else []
                likely = text_logprobs(self._vocabulary, [token], others, self._offset)
            self._offset += len(token.text)
            text, self._before = self._before + token.text, ""
            choice = shape.TextChoice(self._index, text, likely, _REASONS[last] if last else None)
            head = self._head
            usage = self._usage(transcript.generated) if last else UNSET
            events.append(_encode(shape.Completion(head.id, head.created, head.model, head.fingerprint, [choice], usage)))
        return events

    def _usage(self, generated: int) -> Usage | UnsetType:
        prompt = self._prompt_tokens
        return UNSET if prompt is None else Usage(prompt, generated, prompt + generated)


class Ending:
    """The end of a `/v1` stream: the usage, if it is wanted, and `[DONE]`; also behind an error, as in TGI."""

    def __init__(self, head: Head, usage: bool, chat: bool) -> None:
        self._head = head
        self._usage = usage
        self._chat = chat
        self.transcripts: list[Transcript] = []

    def error(self, error: ApiError) -> list[bytes]:
        return [error.body(openai=True), DONE]

    def closing(self) -> list[bytes]:
        if not self._usage:
            return [DONE]
        head, usage = self._head, self._head.usage(self.transcripts)
        kind = shape.ChatChunk if self._chat else shape.Completion
        return [_encode(kind(head.id, head.created, head.model, head.fingerprint, [], usage)), DONE]


def chat_choice(index: int, collector: Collector, reader: Reader, vocabulary: Vocabulary, logprobs: bool) -> shape.Choice:
    """A whole answer."""
    pieces = [*reader.push(collector.transcript.text()), *reader.finish()]
    calls = [piece.call for piece in pieces if piece.call is not None]
    text = "".join(piece.text for piece in pieces if piece.kind == "text")
    thought = "".join(piece.text for piece in pieces if piece.kind == "thought")
    message = shape.Answer(
        "assistant",
        text if text or not calls else None,
        thought or UNSET,
        [MadeCall(call_id(), "function", MadeFunction(call.arguments, call.name)) for call in calls] or UNSET,
    )
    likely = None
    if logprobs:
        others = collector.top or [[] for _ in collector.listed]
        likely = shape.Logprobs([logprob_of(vocabulary, token, top) for token, top in zip(collector.listed, others)])
    finish = "tool_calls" if calls and collector.finish != "length" else _REASONS[collector.finish]
    return shape.Choice(index, message, likely, finish)


def text_choice(index: int, collector: Collector, vocabulary: Vocabulary, logprobs: bool, echo: str) -> shape.TextChoice:
    likely = text_logprobs(vocabulary, collector.listed, collector.top, len(echo)) if logprobs else None
    return shape.TextChoice(index, echo + collector.transcript.text(), likely, _REASONS[collector.finish])


def logprob_of(vocabulary: Vocabulary, token: Token, others: list[Token]) -> shape.Logprob:
    text = vocabulary.token_text(token.id)
    likely = [shape.TopLogprob(other.text, other.logprob, _bytes(other.text)) for other in others]
    return shape.Logprob(text, token.logprob, _bytes(text), likely)


def text_logprobs(vocabulary: Vocabulary, tokens: Sequence[Token], others: Sequence[list[Token]], offset: int) -> shape.TextLogprobs:
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    named = [{other.text: other.logprob or 0.0 for other in top} for top in others]
    return shape.TextLogprobs(
        [vocabulary.token_text(token.id) for token in tokens], [token.logprob for token in tokens], list(named) or None, offsets
    )


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _bytes(text: str) -> list[int] | None:
    """None for a token that is part of a character: its bytes are not the text's."""
    return None if "\ufffd" in text else list(text.encode())
