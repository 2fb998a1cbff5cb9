"""Requests that nobody should send, from a seed: request number i is the same every time, so that a failure can be sent again alone.

A request is a path, a body and the way it goes over the socket. Knows what is hostile and nothing of the right answer.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
PATHS = [NATIVE, "/generate_stream", "/", CHAT, TEXT, "/chat_tokenize", "/tokenize", "/invocations", "/vertex", "/v2/models/m/infer"]
SAID = [{"role": "user", "content": "hello the"}]
SMALL: dict[str, dict[str, Any]] = {
    NATIVE: {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    "/generate_stream": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    "/": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    CHAT: {"messages": SAID, "max_tokens": 3},
    TEXT: {"prompt": "hello", "max_tokens": 3},
    "/chat_tokenize": {"messages": SAID},
    "/tokenize": {"inputs": "hello"},
    "/invocations": {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    "/vertex": {"instances": [{"inputs": "hello", "parameters": {"max_new_tokens": 3}}]},
    "/v2/models/m/infer": {"inputs": [{"name": "x", "data": [104, 105]}], "parameters": {"max_new_tokens": 3}},
}
PARAMETERS = [
    *("adapter_id", "best_of", "decoder_input_details", "details", "do_sample", "frequency_penalty", "grammar", "max_new_tokens"),
    *("repetition_penalty", "return_full_text", "seed", "stop", "temperature", "top_k", "top_n_tokens", "top_p", "truncate", "typical_p"),
    *("watermark", "speculate", "priority", "deadline_ms"),
]
OPENAI = [
    *("model", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "max_tokens", "n", "seed", "stop", "stream"),
    *("stream_options", "temperature", "top_p", "top_k", "typical_p", "user", "speculate", "priority", "deadline_ms", "logprobs"),
]
CHATS = [
    *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "tool_prompt", "parallel_tool_calls", "response_format"),
    *("documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "truncate"),
]
TEXTS = ["prompt", "suffix", "echo", "best_of"]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 1e-45, 1e38, 1e39, 1e300, -1e300, "", "x", "1", "null", "\ud800", "\x00", "😀", "a" * 3000),
    *([], [None], [[]], [1], [""], ["x"], ["x"] * 5, [0.5], [-1], [2**31], {}, {"a": 1}, {"type": "x"}, {"1": 5}, {"cat": 1}, {"-1": 0}),
]
SCHEMAS: list[Any] = [
    {"abc": "def"},
    "{",
    "",
    3,
    None,
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    {"type": "nothing"},
    {"$ref": "#"},
    {"properties": {"a": {"$ref": "#"}}},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "string", "pattern": "("},
    {"enum": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
]
PATTERNS = ["(", "[", "a{1000000}", "(a+)+b", "(?=x)", "\\", ".{0,50000}", "[^\\x00]" * 500, "(?P<n>a)\\1", "\ud800"]
STOPS = ["x" * 100_000, "\ud800", "", "\x00", "hello" * 50]


@dataclass(frozen=True, slots=True)
class Hostile:
    """`manner`: `plain`; `slow` = in small pieces with pauses; `half` = the sending side is closed behind the body; `cut` = the
    connection ends in the middle of the body; `gone` = right behind it; `unread` = nothing of the answer is read; `chunked`, `zipped` = so
    it is encoded; `asked` = the server is to say that it wants the body, which comes anyway."""

    number: int
    kind: str
    path: str
    body: bytes
    manner: str = "plain"

    def wire(self) -> bytes:
        """What goes over the socket."""
        body, more = self.body, ""
        if self.manner == "zipped":
            body, more = gzip.compress(body, 1), "Content-Encoding: gzip\r\n"
        elif self.manner == "asked":
            more = "Expect: 100-continue\r\n"
        if self.manner == "chunked":
            pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])
            more = "Transfer-Encoding: chunked\r\n"
        else:
            more += f"Content-Length: {len(body)}\r\n"
        head = f"POST {self.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}Connection: close\r\n\r\n"
        return head.encode() + body


def request(seed: int, number: int) -> Hostile:
    """The request of this number."""
    dice = random.Random(f"{seed}.{number}")
    kind, make = dice.choice(list(MAKERS.items()))
    path, body = make(dice)
    manner = dice.choice(["plain"] * 12 + ["slow", "half", "cut", "gone", "unread", "chunked", "zipped", "asked"])
    return Hostile(number, kind, path, body if isinstance(body, bytes) else encoded(body), manner)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def _types(dice: random.Random) -> tuple[str, Any]:
    path = dice.choice([NATIVE, "/generate_stream", CHAT, CHAT, TEXT])
    body = dict(SMALL[path])
    fields = PARAMETERS if "inputs" in body else OPENAI + (CHATS if path == CHAT else TEXTS)
    changes = {field: dice.choice(VALUES) for field in dice.sample(fields, dice.choice([1, 1, 1, 2, 4]))}
    if "inputs" in body:
        return path, {**body, "parameters": {**body["parameters"], **changes}}
    return path, {**body, **changes}


def _shapes(dice: random.Random) -> tuple[str, Any]:
    path = dice.choice(PATHS)
    body: dict[str, Any] = json.loads(encoded(SMALL[path]))
    key = dice.choice([*body, "parameters", "messages", "prompt", "inputs", "instances"])
    inner = body.get(key)
    if isinstance(inner, list) and inner and isinstance(inner[0], dict) and dice.random() < 0.7:
        inner[0][dice.choice([*inner[0], "content", "role", "tool_calls", "data", "name"])] = dice.choice(VALUES)
        return path, body
    return path, {**body, key: dice.choice(VALUES)}


def _deep(dice: random.Random) -> tuple[str, Any]:
    path = dice.choice(PATHS)
    count = dice.choice([10, 100, 500, 990, 1000, 5000, 50_000])
    opens, closes = dice.choice([("[", "]"), ('{"a":', "}")])
    deep = opens * count + "1" + closes * dice.choice([count, count - 1, 0])
    field = dice.choice(["messages", "tools", "inputs", "parameters", "chat_template_kwargs", "response_format", "x", "documents"])
    whole = encoded(SMALL[path])
    return path, whole[:-1] + f',"{field}":{deep}}}'.encode()


def _broken(dice: random.Random) -> tuple[str, Any]:
    """Not JSON, not UTF-8, or not to the end."""
    path = dice.choice(PATHS)
    whole = bytearray(encoded(SMALL[path]))
    for _ in range(dice.choice([1, 1, 3])):
        whole[dice.randrange(len(whole))] = dice.choice([0xFF, 0xC0, 0xED, 0x00, 0x22, 0x7B, 0x5C, dice.randrange(256)])
    if dice.random() < 0.3:
        whole = whole[: dice.randrange(len(whole))]
    return path, bytes(whole) + dice.choice([b"", b"", b"garbage", b"{}", b"\xef\xbb\xbf"])


def _large(dice: random.Random) -> tuple[str, Any]:
    path = dice.choice(PATHS)
    text = dice.choice(["a ", "한", "\u0300", "<s>", "\ufffd", "{{"]) * dice.choice([1000] * 8 + [20_000, 20_000, 200_000])
    if path in (CHAT, "/chat_tokenize"):
        count = dice.choice([1, 1, 100, 100, 3000])
        many = [{"role": dice.choice(["user", "assistant", "system", "x"]), "content": text[: 200_000 // count]}] * count
        return path, {**SMALL[path], "messages": many, **dice.choice([{}, {"truncate": "oldest"}, {"truncate": "middle"}])}
    if path == TEXT:
        return path, {**SMALL[path], "prompt": dice.choice([text, [text[:1000]] * 4, [5] * 9000, [[1]] * 5])}
    if path in ("/vertex", "/v2/models/m/infer"):
        return path, SMALL[path]
    return path, {**SMALL[path], "inputs": text}


def _stops(dice: random.Random) -> tuple[str, Any]:
    stop = [dice.choice(STOPS) for _ in range(dice.choice([1, 4, 5, 50]))]
    if dice.random() < 0.5:
        return NATIVE, {"inputs": "hello", "parameters": {"max_new_tokens": 3, "stop": stop}}
    return CHAT, {**SMALL[CHAT], "stop": stop, "stream": dice.random() < 0.5}


def _ids(dice: random.Random) -> tuple[str, Any]:
    wild = [-1, 0, 1, 511, 512, 2**16, 2**31, 2**32, 2**63, 10**30]
    if dice.random() < 0.5:
        return TEXT, {**SMALL[TEXT], "prompt": [dice.choice(wild) for _ in range(dice.choice([1, 5]))], "logprobs": 2, "echo": True}
    return CHAT, {**SMALL[CHAT], "logit_bias": {str(dice.choice([*wild, "cat", "1.5", "²"])): dice.choice([0, 100, -100, 101, None])}}


def _grammars(dice: random.Random) -> tuple[str, Any]:
    kind = dice.choice(["json", "json_object", "json_schema", "regex"])
    value = dice.choice(PATTERNS) if kind == "regex" else dice.choice(SCHEMAS)
    if dice.random() < 0.5:
        return NATIVE, {"inputs": "x", "parameters": {"max_new_tokens": 4, "grammar": {"type": kind, "value": value}}}
    forms = [{"type": kind, "value": value}, {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}, {"type": kind}]
    return CHAT, {**SMALL[CHAT], "max_tokens": 4, "response_format": dice.choice(forms)}


def _tools(dice: random.Random) -> tuple[str, Any]:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": dice.choice(SCHEMAS)}}
    arguments = dice.choice(["{", "9" * 5000, "{}"])
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    choice = dice.choice(["auto", "none", "required", "f", "g", {}, 3])
    messages = dice.choice([SAID, [*SAID, called, {"role": "tool", "content": "1"}]])
    return CHAT, {**SMALL[CHAT], "tools": [tool] * dice.choice([1, 2, 100]), "tool_choice": choice, "messages": messages}


MAKERS: dict[str, Callable[[random.Random], tuple[str, Any]]] = {
    "types": _types,
    "more types": _types,
    "shapes": _shapes,
    "deep": _deep,
    "broken": _broken,
    "large": _large,
    "stops": _stops,
    "ids": _ids,
    "grammars": _grammars,
    "tools": _tools,
}
