"""Carries out a kernel: all threads of many blocks at once, one instruction after another.

Threads that are at different places take turns, those at the earliest place first, so that they
meet again where branches join. Barriers, shuffles and the like need all threads of their block or
warp; it is an error if some are elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ptx import values
from ptx.lanes import POISON, Lanes, computing, reader, writer
from ptx.memory import BARRIER, GlobalMemory, Memory, OutOfBoundsError, Threads
from ptx.opcodes import OF_THREE, TABLE
from ptx.parser import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pack,
    Program,
    PtxError,
    Register,
    Symbol,
)
from ptx.values import Array

BLOCKS_AT_ONCE = 64
"""Registers of so many threads fit into a processor's cache, a few at a time."""
WARP = 32
_LOCAL = 1 << 60
"""Where a thread's own memory begins among generic addresses."""
_REDUCED = {"s32": ("add", "min", "max"), "u32": ("add", "min", "max"), "f32": ("min", "max")}
"""What a warp reduces, by kind."""
STEPS = 1 << 22
"""Of one thread; more are a loop without an end."""


class InexactError(PtxError):
    """An approximate instruction where bits are promised."""


class DivergedError(PtxError):
    """Threads that have to meet are at different places."""


@dataclass
class Executed:
    opcodes: Counter[str] = field(default_factory=Counter)


def execute(
    program: Program,
    arguments: Sequence[int],
    blocks: int,
    threads: int,
    shared: int,
    memory: GlobalMemory,
    exact: bool = True,
) -> Executed:
    """Carry out a launch.

    Args:
        arguments: bits of the parameters, in their order.
        blocks, threads: of the grid, and of a block.
        shared: bytes of a block's memory.
        exact: an approximate instruction is an error.

    Raises:
        PtxError: the kernel does what it must not, or what the machine does not know.
    """
    done = Executed()
    params = dict(zip(program.params, arguments, strict=True))
    with np.errstate(all="ignore"):
        for first in range(0, blocks, BLOCKS_AT_ONCE):
            count = min(BLOCKS_AT_ONCE, blocks - first)
            _Turns(program, params, first, count, threads, shared, memory, exact, done).run()
    return done


@dataclass(frozen=True)
class _Step:
    """A decoded instruction.

    Attributes:
        target: where threads go on that take a branch, or return; -1 for any other instruction.
    """

    opcode: str
    guard: str | None
    negated: bool
    target: int
    run: Callable[[_Turns], None]


@lru_cache(maxsize=512)
def _decoded(program: Program, exact: bool) -> list[_Step]:
    """A program's steps.

    Raises:
        PtxError: it has what the machine does not know, or an approximation and ``exact``.
    """
    steps, end = [], len(program.instructions)
    for one in program.instructions:
        target = one.target
        if one.opcode == "ret":
            target = end
        run = _nothing if target >= 0 else _carrying_out(program, one, exact)
        steps.append(_Step(one.opcode, one.guard, one.negated, target, run))
    return steps


def _nothing(turns: _Turns) -> None:
    """What a branch does beside going elsewhere."""


def _carrying_out(program: Program, one: Instruction, exact: bool) -> Callable[[_Turns], None]:
    operation = TABLE.get(one.opcode)
    if operation is not None and len(one.operands) == len(operation.operands) + 2:
        operation = TABLE.get(one.opcode + OF_THREE)
    if operation is None:
        family, *form = one.opcode.split(".")
        if family not in _TOGETHER:
            raise PtxError(f"{program.name}: unknown instruction: {one.text}")
        together = _TOGETHER[family]
        return lambda turns: together(turns, one, form)
    if exact and not operation.exact:
        raise InexactError(f"{program.name}: {one.text}")
    compute = computing(program, one, operation)
    return lambda turns: compute(turns.lanes)


class _Turns:
    """Some blocks of a launch, from their first instruction to their last."""

    def __init__(
        self,
        program: Program,
        params: dict[str, int],
        first: int,
        blocks: int,
        threads: int,
        shared: int,
        memory: GlobalMemory,
        exact: bool,
        done: Executed,
    ) -> None:
        self._program, self._params, self._done = program, params, done
        self._steps = _decoded(program, exact)
        self._size = blocks * threads
        numbers = np.arange(self._size, dtype=np.int32)
        times = np.zeros(self._size, np.int32)
        self._who = Threads(numbers + np.int32(first * threads), times, threads)
        special = {
            "%tid.x": (numbers % threads).astype(np.uint32),
            "%ctaid.x": (numbers // threads + first).astype(np.uint32),
            "%ntid.x": np.full(self._size, threads, np.uint32),
            "%laneid": (numbers % WARP).astype(np.uint32),
        }
        self.lanes = Lanes(self._size, special)
        self._global = memory
        granule = _least_shared(program) if shared % 4 == 0 else 1
        self._shared = Memory(blocks * shared, granule, equal_writes=True)
        self._shared_size = shared
        self._local = Memory(self._size * program.depot[1])
        self._at = np.zeros(self._size, np.int64)
        self._meetings = 0

    # -- turns ------------------------------------------------------------------------------------

    def run(self) -> None:
        end = len(self._steps)
        for _ in range(STEPS):
            place = int(self._at.min())
            if place >= end:
                return
            self._turn(place, self._those_at(place))
        raise PtxError(f"{self._program.name}: no end in sight")

    def _those_at(self, place: int) -> slice | Array:
        here = self._at == place
        whole = here.reshape(-1, self._who.of_block).all(axis=1)
        edges = np.flatnonzero(np.diff(whole, prepend=False, append=False))
        if len(edges):
            longest = int(np.argmax(edges[1::2] - edges[::2]))
            start, stop = (edges[2 * longest : 2 * longest + 2] * self._who.of_block).tolist()
            if 2 * (stop - start) >= np.count_nonzero(here):
                return slice(start, stop)
        return np.flatnonzero(here)

    def _turn(self, place: int, here: slice | Array) -> None:
        leaders, opcodes = self._program.leaders, self._done.opcodes
        while True:
            one = self._steps[place]
            opcodes[one.opcode] += 1
            chosen = here if one.guard is None else self._passing(one, here)
            place += 1
            if one.target >= 0:
                self._at[here] = place
                if chosen is not None:
                    self._at[chosen] = one.target
                return
            if chosen is not None:
                self.lanes.choose(chosen)
                one.run(self)
            if place in leaders:
                self._at[here] = place
                return

    def _passing(self, one: _Step, here: slice | Array) -> slice | Array | None:
        register = self.lanes.registers.get(one.guard or "")
        if register is None:
            raise PtxError(f"{self._program.name}: %{one.guard} is read before it is written")
        holds = register[here]
        if one.negated:
            holds = ~holds
        if holds.all():
            return here
        if not holds.any():
            return None
        if isinstance(here, slice):
            return np.flatnonzero(holds) + here.start
        return here[holds]

    # -- operands ---------------------------------------------------------------------------------

    def _read(self, source: Operand, kind: str) -> Array:
        return _reader(self._program, source, kind)(self.lanes)

    def _write(self, result: Operand, numbers: Array, kind: str) -> None:
        _writer(self._program, result, kind)(self.lanes, numbers)

    # -- moves ------------------------------------------------------------------------------------

    def move(self, one: Instruction, form: list[str]) -> None:
        (kind,), (result, source) = form, one.operands
        if kind == "pred":
            self._write(result, self._read(source, kind).copy(), kind)
            return
        bits = f"b{kind[1:]}"
        if isinstance(source, Pack):
            self._write(result, self._joined(source, bits), bits)
        elif isinstance(result, Pack):
            part = f"b{8 * values.size_of(bits) // len(result.parts)}"
            whole = np.ascontiguousarray(self._read(source, bits))
            halves = whole.view(values.KINDS[part]).reshape(-1, len(result.parts))
            for place, each in enumerate(result.parts):
                if each is not None:
                    self._write(each, halves[:, place].copy(), part)
        else:
            self._write(result, self._read(source, bits).copy(), bits)

    def _joined(self, pack: Pack, kind: str) -> Array:
        part = f"b{8 * values.size_of(kind) // len(pack.parts)}"
        columns = []
        for each in pack.parts:
            assert each is not None
            if isinstance(each, Register) and each.name not in self.lanes.registers:
                each = Immediate(POISON)  # a half that nobody reads
            columns.append(self._each(each, part))
        return np.ascontiguousarray(np.stack(columns, 1)).view(values.KINDS[kind])[:, 0]

    def convert_address(self, one: Instruction, form: list[str]) -> None:
        if form != ["local", "u64"]:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        place = self._read(one.operands[1], "u64")
        self._write(one.operands[0], place + np.uint64(_LOCAL), "u64")

    def compare_halves(self, one: Instruction, form: list[str]) -> None:
        operation = TABLE.get(f"setp.{form[0]}.{form[-1].removesuffix('x2')}")
        results = one.operands[0]
        if operation is None or form[1:] != ["f16x2"] or not isinstance(results, Register):
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        pairs = [self._each(source, "u32") for source in one.operands[1:]]
        for place, name in enumerate(results.name.split("|%")):
            halves = [(pair >> np.uint32(16 * place)).astype(np.uint16) for pair in pairs]
            found = operation.function(*[half.view(np.float16) for half in halves])
            self._write(Register(name), found, "pred")

    # -- memory -----------------------------------------------------------------------------------

    def load(self, one: Instruction, form: list[str]) -> None:
        space, count, kind = _access(form)
        result, address = one.operands
        assert isinstance(address, Address)
        parts = result.parts if isinstance(result, Pack) else (result,)
        if space == "param":
            assert isinstance(address.base, Symbol)
            number = np.array([self._params[address.base.name]], np.uint64)
            self._write(result, values.typed(number, f"b{kind[1:]}"), f"b{kind[1:]}")
            return
        if len(parts) != count:
            raise PtxError(f"{self._program.name}: operands: {one.text}")
        width = values.size_of(kind)
        memory, places = self._places(address, space, width * count)
        found = memory.load(places, width, count, self._touching())
        for index, part in enumerate(parts):
            if part is not None:
                self._write(part, values.typed(found[:, index].copy(), kind), kind)

    def store(self, one: Instruction, form: list[str]) -> None:
        space, count, kind = _access(form)
        address, source = one.operands
        assert isinstance(address, Address)
        parts = source.parts if isinstance(source, Pack) else (source,)
        if len(parts) != count:
            raise PtxError(f"{self._program.name}: operands: {one.text}")
        width = values.size_of(kind)
        memory, places = self._places(address, space, width * count)
        columns = []
        for part in parts:
            assert part is not None
            columns.append(self._each(part, f"b{8 * width}"))
        memory.store(places, width, np.stack(columns, 1), self._touching())

    def _touching(self) -> Threads:
        return self._who.some(self.lanes.chosen)

    def _places(self, address: Address, space: str, width: int) -> tuple[Memory, Array]:
        if space == "shared":
            offset = self._each(address.base, "u32").astype(np.int64) + address.offset
            return self._shared, self._own(offset, width, self._shared_size, self._who.of_block)
        start = self._each(address.base, "u64") + np.uint64(address.offset & (2**64 - 1))
        if not space and (start >= _LOCAL).all():
            depot = self._program.depot[1]
            return self._local, self._own(
                (start - np.uint64(_LOCAL)).astype(np.int64), width, depot, 1
            )
        return self._global.memory, self._global.places(start, width)

    def _each(self, source: Operand, kind: str) -> Array:
        return np.broadcast_to(self._read(source, kind), self.lanes.count)

    def _own(self, offset: Array, width: int, size: int, threads: int) -> Array:
        if ((offset < 0) | (offset + width > size) | (offset % width != 0)).any():
            raise OutOfBoundsError(f"{self._program.name}: of {size} bytes of its own memory")
        index = np.arange(self._size)[self.lanes.chosen] // threads
        return offset + index * size

    # -- threads together -------------------------------------------------------------------------

    def meet(self, one: Instruction, form: list[str]) -> None:
        if form not in (["sync"], ["warp", "sync"]):
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        of_warp = form[0] == "warp"
        self._whole(WARP if of_warp else self._who.of_block, one)
        self._met(BARRIER + 1 if not of_warp else 1)

    def _met(self, time: int = 1) -> None:
        self._meetings += 1
        if self._meetings == min(BARRIER, 2**31 // BARRIER):
            raise PtxError(f"{self._program.name}: more meetings than can be counted")
        self._who.times[self.lanes.chosen] += np.int32(time)

    def _whole(self, size: int, one: Instruction) -> None:
        chosen = self.lanes.chosen
        if isinstance(chosen, slice):
            return  # whole blocks
        together = len(chosen) % size == 0
        if together:
            groups = chosen.reshape(-1, size)
            together = bool((groups[:, 0] % size == 0).all())
            together &= bool((groups[:, -1] - groups[:, 0] == size - 1).all())
        if not together:
            raise DivergedError(f"{self._program.name}: {one.text}")

    def _all_lanes(self, mask: Operand, one: Instruction) -> None:
        self._whole(WARP, one)
        if (self._read(mask, "u32") != 0xFFFFFFFF).any():
            raise DivergedError(f"{self._program.name}: {one.text}")
        self._met()

    def shuffle(self, one: Instruction, form: list[str]) -> None:
        how = form[1]
        if form not in (["sync", "bfly", "b32"], ["sync", "idx", "b32"]) or len(one.operands) != 5:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        result, source, which, clamp, mask = one.operands
        self._all_lanes(mask, one)
        if (self._read(clamp, "u32") != 31).any():
            raise PtxError(f"{self._program.name}: segments: {one.text}")
        lanes = np.arange(self.lanes.count, dtype=np.int64) % WARP
        wanted = self._read(which, "u32").astype(np.int64) & (WARP - 1)
        giver = (lanes ^ wanted) if how == "bfly" else wanted
        start = np.arange(self.lanes.count) - lanes
        self._write(result, self._each(source, "b32")[start + giver], "b32")

    def reduce(self, one: Instruction, form: list[str]) -> None:
        name, kind = form[1], form[-1]
        known = _REDUCED.get(kind, ())
        if form != ["sync", name, kind] or name not in known:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        result, source, mask = one.operands
        self._all_lanes(mask, one)
        lanes = self._each(source, kind).reshape(-1, WARP)
        combine = TABLE[f"{name}.{kind}"].function
        found = lanes[:, 0]
        for lane in range(1, WARP):
            found = combine(found, lanes[:, lane])
        self._write(result, np.repeat(found, WARP), kind)

    def load_matrices(self, one: Instruction, form: list[str]) -> None:
        count = {"x1": 1, "x2": 2, "x4": 4}.get(form[3])
        if [*form[:3], *form[4:]] != ["sync", "aligned", "m8n8", "shared", "b16"] or not count:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        self._whole(WARP, one)
        result, address = one.operands
        assert isinstance(result, Pack) and isinstance(address, Address)
        memory, rows = self._places(address, "shared", 16)
        lanes = np.arange(self.lanes.count, dtype=np.int64) % WARP
        start = np.arange(self.lanes.count) - lanes
        who = self._touching()
        for matrix, part in enumerate(result.parts):
            assert part is not None
            row = rows[start + 8 * matrix + lanes // 4]
            self._write(part, memory.load(row + lanes % 4 * 4, 4, 1, who)[:, 0], "b32")
        self._met()


_TOGETHER: dict[str, Callable[[_Turns, Instruction, list[str]], None]] = {
    "mov": _Turns.move,
    "cvta": _Turns.convert_address,
    "setp": _Turns.compare_halves,
    "ld": _Turns.load,
    "st": _Turns.store,
    "bar": _Turns.meet,
    "shfl": _Turns.shuffle,
    "redux": _Turns.reduce,
    "ldmatrix": _Turns.load_matrices,
}
"""Instructions that are no function of registers alone."""


_reader, _writer = lru_cache(maxsize=1 << 16)(reader), lru_cache(maxsize=1 << 16)(writer)


@lru_cache(maxsize=512)
def _least_shared(program: Program) -> int:
    kinds = [one.opcode.split(".")[-1] for one in program.instructions if ".shared" in one.opcode]
    return min([4, *map(values.size_of, kinds)])


def _access(form: list[str]) -> tuple[str, int, str]:
    *flags, kind = form
    space = flags.pop(0) if flags and flags[0] in ("global", "shared", "param") else ""
    count = int(flags.pop(0)[1:]) if flags and flags[0] in ("v2", "v4", "v8") else 1
    if flags:
        raise PtxError(f"unknown access: {'.'.join(form)}")
    return space, count, kind
