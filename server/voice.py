"""What a native stream says: one event a token, the last with the whole text. Knows no socket."""

from __future__ import annotations

import msgspec

from forerun.messages import SamplingParams
from forerun.router.request import Run
from forerun.server.answer import Form
from forerun.server.errors import ApiError
from forerun.server.schema import StreamDetails, StreamResponse, Token
from forerun.server.transcript import Transcript

_encode = msgspec.json.Encoder().encode


class NativeVoice:
    """Also the ending of its channel: it has one sequence."""

    def __init__(self, form: Form, params: SamplingParams) -> None:
        self._form = form
        self._seed = params.seed if params.sample else None
        self._index = 0

    def say(self, said: list[Token], run: Run, transcript: Transcript) -> list[bytes]:
        finish = transcript.finish
        events: list[bytes] = []
        for i, token in enumerate(said):
            self._index += 1
            event = StreamResponse(self._index, token)
            if run.top:
                event.top_tokens = transcript.alternatives(run.top[i])
            if self._form.origins:
                event.origin = transcript.origin(i, run)
            if finish and token is said[-1]:
                event.generated_text = self._form.prefix + transcript.text()
                event.details = self._details(transcript) if self._form.details else None
            events.append(_encode(event))
        return events

    def error(self, error: ApiError) -> list[bytes]:
        return [error.body()]

    def closing(self) -> list[bytes]:
        return []

    def _details(self, transcript: Transcript) -> StreamDetails:
        finish = transcript.finish
        assert finish is not None
        return StreamDetails(finish, transcript.generated, self._seed, self._form.input_length, transcript.speculation())
