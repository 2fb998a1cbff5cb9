"""Server-sent events out of a byte stream that may be cut anywhere."""

from __future__ import annotations


class EventParser:
    """Feed bytes, get the data of each event that is complete. Comments and fields other than `data` are dropped; lines end in \\n or
    \\r\\n, as every server in question writes them."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        events: list[bytes] = []
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
