"""Every error a client can see: one exception, two JSON shapes, one place for the words.

    everywhere  {"error": "…", "error_type": "validation"}                                             TGI's
    under /v1   {"error": {"message": "…", "type", "code", "param", …}, "error_type": "validation"}     OpenAI's, with TGI's word beside it

Messages and types are TGI's wherever TGI has one, because clients choose their exception by `error_type`. Knows nothing of requests.
"""

from __future__ import annotations

import msgspec

from forerun.router.request import Failure
from forerun.router.service import Refused
from forerun.server.openai_schema import ErrorObject, OpenAIErrorResponse
from forerun.server.schema import ErrorResponse

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An answer that is an error. `label`: how `tgi_request_failure` counts it; empty = it is not counted. `code`: OpenAI's word for it,
    where it has one that programs look for; else `kind`."""

    def __init__(
        self, status: int, message: str, kind: str, *, label: str = "", headers: dict[str, str] | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.label = label
        self.headers = headers or {}
        self.code = code or kind

    def body(self, *, openai: bool = False) -> bytes:
        return _encode(self.object() if openai else ErrorResponse(self.message, self.kind))

    def object(self) -> OpenAIErrorResponse:
        """As OpenAI's clients read it: they show nothing of an `error` that is a text. TGI's clients still find their `error_type`."""
        told = ErrorObject(self.message, _OPENAI_TYPES.get(self.status, "server_error"), self.code, None, self.status)
        return OpenAIErrorResponse(told, self.kind)


_OPENAI_TYPES = {429: "rate_limit_error", 401: "authentication_error"} | dict.fromkeys(
    (400, 403, 404, 405, 408, 413, 415, 422), "invalid_request_error"
)


def invalid(message: str, *, code: str | None = None) -> ApiError:
    """A parameter out of range, in TGI's words."""
    return ApiError(422, f"Input validation error: {message}", "validation", label="validation", code=code)


def malformed(status: int, message: str) -> ApiError:
    """A body that could not be read; TGI sends these as plain text, we as JSON, so that its own clients can parse them."""
    return ApiError(status, message, "validation", label="validation")


def refused(refusal: Refused) -> ApiError:
    headers = {"Retry-After": str(refusal.retry_after_seconds)}
    return ApiError(429, str(refusal), refusal.kind, label="overloaded", headers=headers)


def unauthorized() -> ApiError:
    message = "Missing or wrong API key: send it as `Authorization: Bearer <key>`"
    return ApiError(401, message, "unauthorized", headers={"WWW-Authenticate": "Bearer"}, code="invalid_api_key")


def missing(message: str) -> ApiError:
    return ApiError(404, message, "not_found")


_FAILURE_LABELS = {
    "generation": "generation",
    "incomplete_generation": "incomplete",
    "incomplete_generation_stream": "incomplete",
    "overloaded": "overloaded",
    "deadline_exceeded": "dropped",
    "validation": "validation",
}


def failed(failure: Failure) -> ApiError:
    """A sequence that ended without finishing."""
    headers = {"Retry-After": "1"} if failure.status == 429 else None
    label = _FAILURE_LABELS.get(failure.kind, "generation")
    return ApiError(failure.status, failure.message, failure.kind, label=label, headers=headers)


def incomplete() -> ApiError:
    """The worker ended a sequence for a reason the front does not share."""
    return ApiError(500, "Incomplete generation", "incomplete_generation", label="incomplete")
