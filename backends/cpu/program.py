"""A function of a batch, recorded once as a program of native ops and replayed by one call: the CPU's counterpart of a device graph.

    recording   the function runs as usual; every op also leaves an instruction that names its tensors by place in a table of addresses
    replaying   the places of the batch and of the results get new addresses, the sizes new values, and the whole list runs natively

Places are of four kinds: fields of the batch; constants (weights, tables, pools), whose address never changes; *buffers*, results of ops,
[n, width] or [m, width], which live in one arena and share memory when their lives do not overlap; and results that the function returned,
which get fresh memory at every replay. Only ops may touch tensors while recording: anything else (a torch operator, a value read back)
would be missing at a replay, so it makes the function unrecordable, and it is then simply called each time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.backends.base import Rows
from forerun.backends.cpu.library import OP, PLACES, Library

FIELDS = ("tokens", "positions", "slots", "parents", "starts", "known", "context", "pages", "logit_rows", "sight")
_fields = operator.attrgetter(*FIELDS)
N, M = 0, 1
"""Row kinds: all rows of the batch, or those whose logits are needed."""

ROOM = 256
"""Rows that the arena has room for at first."""


class Unrecordable(Exception):
    """The function did something that a replay could not repeat."""


@dataclasses.dataclass(slots=True)
class Buffer:
    """Memory of `width` bytes a row for one op's result at a time. `free` while no tensor of the function lives in it."""

    kind: int
    width: int
    place: int
    free: bool = False


@dataclasses.dataclass(slots=True)
class Tape:
    """What a recording leaves. `table`: an address for each place, 0 where a replay fills it in; `keep`: owners of the constants."""

    ops: bytearray = dataclasses.field(default_factory=bytearray)
    count: int = 0
    table: list[int] = dataclasses.field(default_factory=lambda: [0] * len(FIELDS))
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    keep: list[Any] = dataclasses.field(default_factory=list)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens to ops (`emit`, `result`) and refuses every other operation on tensors while it is entered."""

    def __init__(self, batch: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.inside = False  # an op is at work: its own allocations are no business of the tape
        self._constants: dict[int, int] = {}  # address → place
        self._places: dict[int, int] = {
            id(getattr(batch, name)): place for place, name in enumerate(FIELDS)
        }  # id of a living tensor → place
        self._kinds: dict[int, int] = {id(getattr(batch, name)): N for name in (*FIELDS[:4], "sight")} | {id(batch.logit_rows): M}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside or (not args_hold_tensors(args) and torch.is_tensor(result) and not result.numel()):
            return result  # an empty tensor out of nothing is a constant
        raise Unrecordable(f"it calls {func} between ops")

    def kind(self, like: Tensor) -> int:
        """Whether a tensor has a row for each of n or of m."""
        kind = self._kinds.get(id(like))
        if kind is None:
            raise Unrecordable("an op's rows do not come from the batch")
        return kind

    def rows(self, like: Tensor, beside: Sequence[Tensor], given: Sequence[Tensor]) -> int:
        """The kind of an op's rows. What lies `beside` must be of the same kind, and what is `given` a field of the batch: a constant would
        keep its size while the batch's changes."""
        kind = self.kind(like)
        if any(self.kind(tensor) != kind for tensor in beside):
            raise Unrecordable("an op's operands have rows of different kinds")
        if any(self._places.get(id(tensor), len(FIELDS)) >= len(FIELDS) for tensor in given):
            raise Unrecordable("attention is over segments that are not the batch's")
        return kind

    def rows_of(self, x: Tensor) -> int:
        """How many rows it has in a replay, as TAKE wants to know it: FR_N or FR_M as −1 or −2, or a fixed number."""
        kind = self._kinds.get(id(x))
        return x.shape[0] if kind is None else -1 - kind

    def result(self, tensor: Tensor, kind: int) -> None:
        """`tensor`, just made for an op's result, gets a buffer that is free again when the function lets go of it."""
        tape, width = self.tape, tensor.shape[1] * tensor.element_size() if tensor.dim() > 1 else tensor.element_size()
        buffer = next((b for b in tape.buffers if b.free and b.kind == kind and b.width == width), None)
        if buffer is None:
            buffer = Buffer(kind, width, len(tape.table))
            tape.table.append(0)
            tape.buffers.append(buffer)
        buffer.free = False
        key = id(tensor)
        self._places[key], self._kinds[key] = buffer.place, kind
        weakref.finalize(tensor, self._release, key, buffer).atexit = False

    def _release(self, key: int, buffer: Buffer) -> None:
        del self._places[key], self._kinds[key]
        buffer.free = True

    def emit(self, code: int, kind: int, operands: Sequence[Tensor | int | None], integers: Sequence[int], floats: Sequence[float]) -> None:
        """An op as the library knows it. An operand is a tensor, the address of something that outlives the program, or None."""
        places = [self._place(operand) for operand in operands]
        self.tape.ops += encode(code, kind, places, integers, floats)
        self.tape.count += 1

    def place_of(self, tensor: Tensor) -> int | None:
        return self._places.get(id(tensor))

    def kind_of(self, tensor: Tensor) -> int:
        return self._kinds[id(tensor)]

    def _place(self, operand: Tensor | int | None) -> int:
        if operand is None:
            return -1
        address = operand if isinstance(operand, int) else 0
        if not address:
            known = self._places.get(id(operand))
            if known is not None:
                return known
            address = operand.data_ptr()  # type: ignore[union-attr]
            self.tape.keep.append(operand)
        place = self._constants.get(address)
        if place is None:
            place = self._constants[address] = len(self.tape.table)
            self.tape.table.append(address)
        return place


def encode(code: int, kind: int, places: Sequence[int], integers: Sequence[int], floats: Sequence[float]) -> bytes:
    return OP.pack(
        code,
        kind,
        *places,
        *(-1,) * (PLACES - len(places)),
        *integers,
        *(0,) * (10 - len(integers)),
        *floats,
        *(0.0,) * (4 - len(floats)),
    )


def args_hold_tensors(args: Sequence[Any]) -> bool:
    return any(torch.is_tensor(arg) for arg in args)


class Program:
    """A recorded function. `outputs`: (path in the result, place, kind, shape behind the rows, dtype) of each tensor it returns."""

    def __init__(self, recorder: Recorder, result: Any, library: Library) -> None:
        tape = recorder.tape
        self._library = library
        self._keep = tape.keep
        self._ops = ctypes.create_string_buffer(bytes(tape.ops), len(tape.ops))
        self._table = (ctypes.c_uint64 * len(tape.table))(*tape.table)
        self._sizes = (ctypes.c_int32 * 4)()
        self._at = ctypes.addressof(self._ops), tape.count, ctypes.addressof(self._table), ctypes.addressof(self._sizes)
        self._outputs: list[tuple[int, int, tuple[int, ...], torch.dtype]] = []
        self._shape = self._trace(result, recorder)
        returned = {place for place, *_ in self._outputs}
        self._buffers = [buffer for buffer in tape.buffers if buffer.place not in returned]
        self._room = 0
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _trace(self, value: Any, recorder: Recorder) -> Callable[[list[Tensor]], Any]:
        """How the function's result is put together from fresh tensors."""
        if torch.is_tensor(value):
            place = recorder.place_of(value)
            if place is None:
                if value.numel():
                    raise Unrecordable("it returns a tensor that no op made")
                return lambda fresh: value
            if place < len(FIELDS):
                raise Unrecordable("it returns a field of the batch")
            index = next((i for i, output in enumerate(self._outputs) if output[0] == place), len(self._outputs))
            if index == len(self._outputs):
                self._outputs.append((place, recorder.kind_of(value), tuple(value.shape[1:]), value.dtype))
            return lambda fresh: fresh[index]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {field.name: self._trace(getattr(value, field.name), recorder) for field in dataclasses.fields(value)}
            make = type(value)
            return lambda fresh: make(**{name: part(fresh) for name, part in parts.items()})
        if isinstance(value, tuple | list):
            members, kind = [self._trace(member, recorder) for member in value], type(value)
            return lambda fresh: kind(part(fresh) for part in members)
        return lambda fresh: value

    def __call__(self, batch: Rows) -> Any:
        n, m = batch.tokens.shape[0], batch.logit_rows.shape[0]
        if max(n, m) > self._room:
            self._grow(max(n, m))
        table, sizes = self._table, self._sizes
        for place, field in enumerate(_fields(batch)):
            table[place] = field.data_ptr()
        fresh = []
        for place, kind, shape, dtype in self._outputs:
            tensor = torch.empty(m if kind else n, *shape, dtype=dtype)
            table[place] = tensor.data_ptr()
            fresh.append(tensor)
        sizes[0], sizes[1], sizes[2], sizes[3] = n, m, batch.known.shape[0], batch.pages.shape[1]
        self._library.run(*self._at)
        return self._shape(fresh)

    def _grow(self, rows: int) -> None:
        """Room for so many rows, and a half more; the old arena goes first."""
        self._room = max(ROOM, rows + rows // 2) if self._room else max(ROOM, rows)
        sizes = [-(-buffer.width * self._room // 64) * 64 for buffer in self._buffers]
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena = torch.empty(sum(sizes) + 64, dtype=torch.uint8)
        at = -(-self._arena.data_ptr() // 64) * 64
        for buffer, size in zip(self._buffers, sizes):
            self._table[buffer.place] = at
            at += size
