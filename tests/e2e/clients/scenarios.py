"""What the scripts of this folder share. They run outside the tests' environment, under the Python that `make clients` made, because their
libraries want other versions than ours do.

A script holds scenarios, functions called `check_…(url)`; it prints one JSON line for each: its name, and what went wrong or null.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

PROMPT = "the quick brown hello"
SECONDS = 30.0


def main(names: Mapping[str, Any]) -> None:
    """Run the scenarios among `names` (a module's globals) against the server that the command line names."""
    for name, scenario in names.items():
        if name.startswith("check_"):
            print(json.dumps({"name": name, "error": _outcome(scenario)}), flush=True)


def _outcome(scenario: Callable[[str], None]) -> str | None:
    try:
        scenario(sys.argv[1])
    except Exception:
        return traceback.format_exc()
    return None


def generate(url: str, inputs: str = PROMPT, **parameters: Any) -> str:
    """What the server says to a client without a library."""
    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text: str = json.load(answer)["generated_text"]
    return text


@contextlib.contextmanager
def left_behind(url: str) -> Iterator[None]:
    """What is begun and given up inside leaves nothing running, although the answer would go on for minutes."""
    before = _metric(url, 'tgi_request_failure{err="dropped"}')
    yield
    end = time.monotonic() + SECONDS
    while _metric(url, "tgi_batch_current_size") or _metric(url, 'tgi_request_failure{err="dropped"}') == before:
        assert time.monotonic() < end, "the row is not free, though the client left"
        time.sleep(0.02)


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=SECONDS) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def refuses(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """`call` raises this, and its text says so."""
    try:
        call()
    except kind as refusal:
        assert words in str(refusal), str(refusal)
    else:
        raise AssertionError(f"no {kind.__name__}")
