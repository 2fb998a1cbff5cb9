"""What generated text must follow: from a request's field to the form that workers compile.

Owns the shapes in which clients say it (TGI's `grammar`) and the process that reads it (`grammar_check.py`): the event loop only waits,
with a bounded memory of what was read before. A grammar that takes too long or too much ends that process, which is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections import Counter, OrderedDict
from typing import Any, Literal

import msgspec

from forerun.router.service import Refused
from forerun.server.errors import invalid, malformed, refused
from forerun.server.schema import Grammar

MOST_BYTES = 256 << 10
"""of a grammar; the largest that people wrote by hand have a tenth"""
KEPT, KEPT_BYTES = 256, 4 << 20
"""answers that are remembered, and the bytes of them all"""
WAIT_SECONDS = 30.0
"""behind the grammars of others; then it is an overload, since nobody should wait minutes for a hundred grammars of two seconds"""
WALL_SECONDS = 60.0
"""for a process that was stopped; what takes too long is ended by its own clock (`grammar_check.SECONDS`)"""
COMMAND = (sys.executable, "-P", "-m", "forerun.server.grammar_check")

_SHAPE = "Failed to deserialize the JSON body into the target type: "


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """`value`: the JSON text of a schema or of a list of texts, a regular expression, a grammar in Lark's or GBNF's notation, or the JSON
    text of the calls to be made. Further fields as in `grammar_check.Asked`."""

    kind: Literal["schema", "regex", "choice", "ebnf", "calls"]
    value: str
    strict: bool = False
    thought: Literal["", "may", "inside"] = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What became of a grammar: the form that workers compile, or why there is none. In words, not as an exception, which would keep the
    stack of everybody who got it, request included, for as long as it is remembered."""

    grammar: str = ""
    error: str | None = None


def of_native(grammar: Grammar) -> Constraint:
    """TGI's forms. Raises ApiError (422)."""
    value = grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise malformed(422, f"{_SHAPE}parameters.grammar: invalid type, expected a string")
        return Constraint("regex", value)
    if grammar.type == "json_schema":
        if not isinstance(value, dict) or "schema" not in value:
            raise malformed(422, f"{_SHAPE}parameters.grammar: missing field `schema`")
        value = value["schema"]
    if isinstance(value, str):
        return Constraint("schema", value)
    if not isinstance(value, dict):
        raise invalid("grammar is not supported")
    return Constraint("schema", json_text(value))


def json_text(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise invalid("grammar is not valid: it is nested too deeply") from None


class GrammarReader:
    """`environment`: of the process; None = ours."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._reading: dict[Constraint, asyncio.Task[Reading]] = {}
        self._waiting: Counter[asyncio.Task[Reading]] = Counter()
        self._begun: Constraint | None = None
        self._known: OrderedDict[Constraint, Reading] = OrderedDict()
        self._bytes = 0

    async def read(self, constraint: Constraint) -> str:
        """The form that workers compile. Raises ApiError: 422, or 429 where too many others are read before it."""
        size = len(constraint.value.encode())
        if size > MOST_BYTES:
            raise invalid(f"grammar is not valid: it has {size} bytes, {MOST_BYTES} are the most")
        known = self._known.get(constraint)
        if known is None:
            known = await self._answer(constraint)
        else:
            self._known.move_to_end(constraint)
        if known.error is not None:
            raise invalid(f"grammar is not valid: {known.error}")
        return known.grammar

    async def _answer(self, constraint: Constraint) -> Reading:
        """A client that leaves does not take the answer away from the others that wait for it. What nobody waits for any more is not begun:
        clients that ask and leave would else make a queue for those who stay."""
        task = self._reading.get(constraint)
        if task is None:
            task = self._reading[constraint] = asyncio.create_task(self._read(constraint))
            task.add_done_callback(lambda done: self._over(constraint, done))
        self._waiting[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                if self._begun != constraint and not task.done():
                    self._over(constraint, task)
                    task.cancel()

    def _over(self, constraint: Constraint, task: asyncio.Task[Reading]) -> None:
        if self._reading.get(constraint) is task:
            del self._reading[constraint]

    async def close(self) -> None:
        """End the process; what is being read is not waited for."""
        for task in list(self._reading.values()):
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        await self._end()

    async def _read(self, constraint: Constraint) -> Reading:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise refused(Refused("Model is overloaded: the grammars of others take long to read")) from None
        try:
            self._begun = constraint
            told = await self._ask(constraint)
        finally:
            self._begun = None
            self._turn.release()
        self._keep(constraint, told)
        return told

    def _keep(self, constraint: Constraint, told: Reading) -> None:
        self._known[constraint] = told
        self._bytes += _weight(constraint, told)
        while len(self._known) > KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= _weight(*self._known.popitem(last=False))

    async def _ask(self, constraint: Constraint) -> Reading:
        """One question to the process, which may be its last."""
        process = await self._running()
        assert process.stdin is not None and process.stdout is not None
        body = msgspec.json.encode(constraint)
        try:
            async with asyncio.timeout(WALL_SECONDS):
                process.stdin.write(len(body).to_bytes(4, "big") + body)
                head = await process.stdout.readexactly(4)
                return msgspec.json.decode(await process.stdout.readexactly(int.from_bytes(head, "big")), type=Reading)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            code = await self._end()
            return Reading(error=f"it takes too {'long' if code in (-signal.SIGPROF, -signal.SIGKILL) else 'much memory'} to read")
        except BaseException:
            await self._end()  # the answer to this question must not be taken for that to the next
            raise

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            try:
                # No session of its own: Linux shares processors between sessions first (autogroups), and in one a process gets as much as
                # the whole server, however nice it is.
                self._process = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, stderr=null, env=self._environment)
            except OSError as error:
                raise refused(Refused(f"no process could be started to read the grammar: {error}")) from error
        return self._process

    async def _end(self) -> int:
        """Its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        # Not process.kill(): that polls first, and so takes the code of a process that just ended from asyncio, which then says 255.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return await process.wait()


def _weight(constraint: Constraint, told: Reading) -> int:
    return len(constraint.value) + len(told.grammar) + len(told.error or "")
