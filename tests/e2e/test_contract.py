"""A running server against its own OpenAPI document: schemathesis makes requests from it, valid and not, and looks at every answer.

What it looks for: answers of 5xx, statuses and media types that the document does not have, bodies that are not what it says. The short
form is part of the fast suite, `make fuzz` runs the long one. The document says of a stream what each event's JSON is, as TGI's does;
schemathesis takes it for the event with its frame, so it is told of the frame, and the JSON is looked at here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.server import Server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
PROGRAM = Path(sys.executable).with_name("schemathesis")
EVENTS = "text/event-stream"
GOOD = ["2xx", "3xx", "4xx"]
SAID_SO = [503, 504]
"""a probe while the machine stops a worker; a request that sets `deadline_ms` to 1. Another check sees that no other route answers so"""
PATIENT_SECONDS = 300
"""for an answer, in the long run: the machine may have other things to do meanwhile"""
FRAME = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
SAID = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "logprobs": True, "stream_options": {"include_usage": True}}
STREAMS: dict[str, dict[str, Any]] = {
    "/": {"inputs": "hello", "stream": True, "parameters": {"max_new_tokens": 5, "details": True, "top_n_tokens": 2}},
    "/generate_stream": {"inputs": "hello", "parameters": {"max_new_tokens": 5}},
    "/v1/chat/completions": {**SAID, "top_logprobs": 2, "n": 2},
    "/v1/completions": {"prompt": ["hello", "the"], "max_tokens": 5, "logprobs": 2, "echo": True},
    "/invocations": {**SAID, "stream": True},
}


def document(server: Server) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(server.ask("/api-doc/openapi.json")[1])
    return made


def run(server: Server, folder: Path, *options: str, seconds: float) -> None:
    made = document(server)
    for methods in made["paths"].values():
        for operation in methods.values():
            if EVENTS in (content := operation["responses"]["200"].get("content", {})):
                content[EVENTS] = {"schema": FRAME}
    (folder / "openapi.json").write_text(json.dumps(made))
    (folder / "schemathesis.toml").write_text(f"[checks.not_a_server_error]\nexpected-statuses = {[*GOOD, *SAID_SO]}\n")
    command = [str(PROGRAM), "run", str(folder / "openapi.json"), "--url", server.url, "--checks", CHECKS, "--seed", "1", "--no-color"]
    done = subprocess.run(
        [*command, "--warnings", "off", "--exclude-path-regex", "^/debug|^/metrics", *options],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_few_requests_keep_to_the_document(echo: Server, tmp_path: Path) -> None:
    run(echo, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "4", "--generation-deterministic", seconds=100)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_requests_keep_to_the_document(echo: Server, tmp_path: Path) -> None:
    patient = ("--request-timeout", str(PATIENT_SECONDS))
    run(echo, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200", *patient, seconds=7000)


@pytest.mark.parametrize("path", STREAMS)
def test_every_event_is_what_the_document_says(echo: Server, path: str) -> None:
    made = document(echo)
    schema = made["paths"][path]["post"]["responses"]["200"]["content"][EVENTS]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": made["components"]})
    status, raw = echo.ask(path, {**STREAMS[path], **({"stream": True} if path.startswith("/v1") else {})})
    events = [event.removeprefix(b"data: ") for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    assert status == 200 and len(events) >= 5
    for event in events:
        validator.validate(json.loads(event))
