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
from forerun.server.openai_params import Asked
from forerun.server.openai_schema import ChatFinish, Delta, DeltaCall, MadeCall, MadeFunction, Usage
from forerun.server.reading import Reader
from forerun.server.schema import FinishReason, Origin, Token
from forerun.server.transcript import Transcript, Vocabulary, prefill

_encode = msgspec.json.Encoder().encode
DONE = b"[DONE]"
_REASONS: dict[FinishReason, ChatFinish] = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of a response have in common. `prompt_tokens`: of all its prompts. `mute`: what is generated is not shown and not
    counted."""

    id: str
    created: int
    model: str
    fingerprint: str
    prompt_tokens: int
    mute: bool = False

    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}

    def usage(self, transcripts: Sequence[Transcript]) -> Usage:
        return self.count(sum(transcript.generated for transcript in transcripts))

    def count(self, generated: int) -> Usage:
        generated = 0 if self.mute else generated
        return Usage(self.prompt_tokens, generated, self.prompt_tokens + generated)


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, said again before the answer. `tokens`: those of the prompt whose log-probabilities are told too. `alone`: nothing
    was to be generated; the one token that was is left out."""

    text: str = ""
    tokens: Sequence[int] = ()
    alone: bool = False


class ChatVoice:
    """One answer of a chat stream. A chunk a token; what may become a call or the end of a thought waits until it is clear. The role comes
    once: OpenAI's helper puts together all texts that it gets."""

    def __init__(self, head: Head, index: int, reader: Reader, vocabulary: Vocabulary, wanted: Asked) -> None:
        self._head = head
        self._index = index
        self._reader = reader
        self._vocabulary = vocabulary
        self._wanted = wanted
        self._calls = 0
        self._begun = False

    def say(self, said: list[Token], run: Run, transcript: Transcript) -> list[bytes]:
        events: list[bytes] = []
        for i, token in enumerate(said):
            last = transcript.finish if token is said[-1] else None
            deltas = self._deltas(token.text, bool(last))
            likely = None
            if self._wanted.logprobs:
                others = transcript.alternatives(run.top[i]) if run.top else []
                likely = shape.Logprobs([logprob_of(self._vocabulary, token, others)])
            if not deltas and (likely or last):
                deltas = [Delta(content="") if last and not self._calls else Delta()]
            if deltas and not self._begun:
                deltas[0].role, self._begun = "assistant", True
            for place, delta in enumerate(deltas):
                finish = self._finish(last) if last and place == len(deltas) - 1 else None
                origin = transcript.origin(i, run) if self._wanted.origins else UNSET
                usage = self._head.count(transcript.generated - len(said) + i + 1) if self._wanted.counting else None
                events.append(self._chunk(delta, likely if place == 0 else None, finish, origin, usage))
        return events

    def _deltas(self, text: str, last: bool) -> list[Delta]:
        found: list[Delta] = []
        for piece in (*self._reader.push(text), *(self._reader.finish() if last else ())):
            match piece.kind:
                case "call":
                    begun = DeltaCall(self._calls, MadeFunction("", piece.text), id=call_id(), type="function")
                    self._calls += 1
                    found.append(Delta(tool_calls=[begun]))
                case "arguments":
                    found.append(Delta(tool_calls=[DeltaCall(self._calls - 1, MadeFunction(piece.text))]))
                case "thought":
                    found.append(Delta(reasoning_content=piece.text))
                case "text":
                    found.append(Delta(content=piece.text))
        return found

    def _finish(self, reason: FinishReason) -> ChatFinish:
        return "tool_calls" if self._calls and reason != "length" else _REASONS[reason]

    def _chunk(
        self, delta: Delta, likely: shape.Logprobs | None, finish: ChatFinish | None, origin: Origin | UnsetType, usage: Usage | None
    ) -> bytes:
        head = self._head
        choice = shape.ChunkChoice(self._index, delta, likely, finish, origin)
        return _encode(shape.ChatChunk(head.id, head.created, head.model, head.fingerprint, [choice], usage))


class TextVoice:
    """One answer of a completion stream. `prompt_tokens`: of its prompt, for the usage that TGI puts into the last chunk of each."""

    def __init__(self, head: Head, index: int, vocabulary: Vocabulary, wanted: Asked, echo: Echo, prompt_tokens: int) -> None:
        self._head = head
        self._index = index
        self._vocabulary = vocabulary
        self._wanted = wanted
        self._echo = echo
        self._before: str | None = echo.text
        self._offset = 0
        self._prompt_tokens = prompt_tokens

    def say(self, said: list[Token], run: Run, transcript: Transcript) -> list[bytes]:
        events: list[bytes] = []
        for i, token in enumerate(said):
            last = transcript.finish if token is said[-1] else None
            if not (token.text or last or self._wanted.logprobs or self._wanted.origins):
                continue
            others = [transcript.alternatives(run.top[i])] if run.top else []
            before, self._before = self._before or "", ""
            tokens = [] if self._echo.alone else [token]
            likely = self._likely(transcript, before, tokens, others) if self._wanted.logprobs else None
            origin = transcript.origin(i, run) if self._wanted.origins and tokens else UNSET
            text = before + "".join(one.text for one in tokens)
            choice = shape.TextChoice(self._index, text, likely, _REASONS[last] if last else None, origin)
            head = self._head
            usage = self._usage(transcript.generated - len(said) + i + 1, bool(last))
            events.append(_encode(shape.Completion(head.id, head.created, head.model, head.fingerprint, [choice], usage)))
        return events

    def _likely(self, transcript: Transcript, before: str, tokens: list[Token], others: list[list[Token]]) -> shape.TextLogprobs:
        told = self._echo.tokens if before else ()
        likely = text_logprobs(self._vocabulary, told, transcript, tokens, others if tokens else [], self._offset + len(before))
        self._offset += len(before) + sum(len(token.text) for token in tokens)
        return likely

    def _usage(self, generated: int, last: bool) -> Usage | UnsetType:
        """Where one more chunk tells that of all prompts, none here."""
        if self._wanted.counting:
            return self._head.count(generated)
        if self._wanted.usage or not last:
            return UNSET
        return dataclasses.replace(self._head, prompt_tokens=self._prompt_tokens).count(generated)


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


def chat_choice(index: int, collector: Collector, reader: Reader, vocabulary: Vocabulary, wanted: Asked) -> shape.Choice:
    """A whole answer."""
    pieces = [*reader.push(collector.transcript.text()), *reader.finish()]
    text = "".join(piece.text for piece in pieces if piece.kind == "text")
    thought = "".join(piece.text for piece in pieces if piece.kind == "thought")
    calls: list[MadeCall] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append(MadeCall(call_id(), "function", MadeFunction("", piece.text)))
        elif piece.kind == "arguments":
            calls[-1].function.arguments += piece.text
    message = shape.Answer("assistant", text if text or not calls else None, thought or UNSET, calls or UNSET)
    likely = None
    if wanted.logprobs:
        others = collector.top or [[] for _ in collector.listed]
        likely = shape.Logprobs([logprob_of(vocabulary, token, top) for token, top in zip(collector.listed, others)])
    finish = "tool_calls" if calls and collector.finish != "length" else _REASONS[collector.finish]
    return shape.Choice(index, message, likely, finish, collector.origins if wanted.origins else UNSET)


def text_choice(index: int, collector: Collector, vocabulary: Vocabulary, wanted: Asked, echo: Echo) -> shape.TextChoice:
    """A whole answer."""
    likely, transcript = None, collector.transcript
    tokens, top = ([], []) if echo.alone else (collector.listed, collector.top)
    if wanted.logprobs:
        likely = text_logprobs(vocabulary, echo.tokens, transcript, tokens, top, len(echo.text))
    text = echo.text if echo.alone else echo.text + transcript.text()
    origins = collector.origins if wanted.origins and not echo.alone else UNSET
    return shape.TextChoice(index, text, likely, _REASONS[collector.finish], UNSET, origins)


def logprob_of(vocabulary: Vocabulary, token: Token, others: list[Token]) -> shape.Logprob:
    text = vocabulary.token_text(token.id)
    likely = [shape.TopLogprob(other.text, other.logprob, _bytes(other.text)) for other in others]
    return shape.Logprob(text, token.logprob, _bytes(text), likely)


def text_logprobs(
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    transcript: Transcript,
    tokens: Sequence[Token],
    others: Sequence[list[Token]],
    offset: int,
) -> shape.TextLogprobs:
    """Of the prompt's tokens and of those that were generated, which begin at `offset` of the text. The first token has none: nothing comes
    before it. `others`: alternatives of the generated ones, empty where none were asked for; as at OpenAI the token itself is one more
    where it is none of the most likely."""
    known = prefill(vocabulary, prompt, transcript.prompt_logprobs) if prompt else []
    texts = [token.text for token in known] + [vocabulary.token_text(token.id) for token in tokens]
    logprobs = [token.logprob for token in known] + [token.logprob for token in tokens]
    tops = [[], *map(transcript.alternatives, transcript.prompt_top)] if known and transcript.prompt_top else [[] for _ in known]
    named = [
        {other.text: other.logprob or 0.0 for other in top} | {text: logprob or 0.0} if top else None
        for text, logprob, top in zip(texts, logprobs, [*tops, *others])
    ]
    offsets = _offsets([token.text for token in known], 0) + _offsets([token.text for token in tokens], offset)
    return shape.TextLogprobs(texts, logprobs, named if any(named) else None, offsets)


def _offsets(texts: Sequence[str], offset: int) -> list[int]:
    found: list[int] = []
    for text in texts:
        found.append(offset)
        offset += len(text)
    return found


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _bytes(text: str) -> list[int] | None:
    """None for a token that is part of a character: its bytes are not the text's."""
    return None if "\ufffd" in text else list(text.encode())
