"""Carries out a kernel: all threads of many blocks at once, one instruction after another.

Threads that are at different places take turns, those at the earliest place first, so that they
meet again where branches join. Barriers, shuffles and the like need all threads of their block or
warp; it is an error if some are elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ptx import values
from ptx.memory import GlobalMemory, Memory, OutOfBoundsError, Threads
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

BLOCKS_AT_ONCE = 32
WARP = 32
_LOCAL = 1 << 60
"""Where a thread's own memory begins among generic addresses."""
_POISON = 0xA5A5A5A5A5A5A5A5
"""What a register holds that was not written yet."""
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
    """What a launch did: instructions by name, each counted once for all threads of a turn."""

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
        self._program, self._params, self._exact, self._done = program, params, exact, done
        self._size = blocks * threads
        numbers = np.arange(self._size, dtype=np.int64)
        self._who = Threads(
            numbers + first * threads,
            np.zeros(self._size, np.int32),
            np.zeros(self._size, np.int32),
            threads,
        )
        self._special = {
            "%tid.x": (numbers % threads).astype(np.uint32),
            "%ctaid.x": (numbers // threads + first).astype(np.uint32),
            "%ntid.x": np.full(self._size, threads, np.uint32),
            "%laneid": (numbers % WARP).astype(np.uint32),
        }
        self._registers: dict[str, Array] = {}
        self._global = memory
        self._shared, self._shared_size = Memory(blocks * shared, equal_writes=True), shared
        self._local = Memory(self._size * program.depot[1])
        self._at = np.zeros(self._size, np.int64)
        self._chosen: Array | slice = slice(None)
        self._count = self._size

    # -- turns ------------------------------------------------------------------------------------

    def run(self) -> None:
        end = len(self._program.instructions)
        for _ in range(STEPS):
            place = int(self._at.min())
            if place >= end:
                return
            here = np.flatnonzero(self._at == place)
            self._turn(place, here)
        raise PtxError(f"{self._program.name}: no end in sight")

    def _turn(self, place: int, here: Array) -> None:
        """From one place to the next branch, or to where others may wait."""
        instructions, leaders = self._program.instructions, self._program.leaders
        while True:
            one = instructions[place]
            self._done.opcodes[one.opcode] += 1
            chosen = self._passing(one, here)
            if one.opcode in ("bra", "bra.uni", "ret"):
                target = one.target if one.target >= 0 else len(instructions)
                self._at[here] = place + 1
                self._at[chosen] = target
                return
            if len(chosen):
                self._choose(chosen)
                self._do(one)
            place += 1
            if place in leaders:
                self._at[here] = place
                return

    def _passing(self, one: Instruction, here: Array) -> Array:
        if one.guard is None:
            return here
        self._choose(here)
        holds = self._read(Register(one.guard), "pred")
        return here[~holds if one.negated else holds]

    def _choose(self, chosen: Array) -> None:
        self._count = len(chosen)
        self._chosen = slice(None) if self._count == self._size else chosen

    def _do(self, one: Instruction) -> None:
        operation = TABLE.get(one.opcode)
        if operation is not None and len(one.operands) == len(operation.operands) + 2:
            operation = TABLE.get(one.opcode + OF_THREE)
        if operation is None:
            family = one.opcode.split(".")[0]
            if family not in _TOGETHER:
                raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
            _TOGETHER[family](self, one, one.opcode.split(".")[1:])
            return
        if self._exact and not operation.exact:
            raise InexactError(f"{self._program.name}: {one.text}")
        result, *sources = one.operands
        if len(sources) != len(operation.operands):
            raise PtxError(f"{self._program.name}: operands: {one.text}")
        numbers = [
            self._read(source, kind)
            for source, kind in zip(sources, operation.operands, strict=True)
        ]
        self._write(result, operation.function(*numbers), operation.result)

    # -- operands ---------------------------------------------------------------------------------

    def _kind(self, name: str) -> str:
        return self._program.kinds[name.rstrip("0123456789")]

    def _dtype(self, name: str) -> type:
        kind = values.KINDS[self._kind(name)]
        return np.bool_ if kind is np.bool_ else values.UNSIGNED[np.dtype(kind).itemsize]

    def _read(self, source: Operand, kind: str) -> Array:
        if isinstance(source, Register):
            if source.name not in self._registers:
                raise PtxError(f"{self._program.name}: %{source.name} is read before it is written")
            return values.typed(self._registers[source.name][self._chosen], kind)
        if isinstance(source, Symbol) and source.name in self._special:
            return values.typed(self._special[source.name][self._chosen], kind)
        if kind == "pred" and isinstance(source, Immediate):
            return np.array([source.bits != 0])
        size = values.size_of(kind)
        bits = self._constant(source) & ((1 << 8 * size) - 1)
        count = self._count if kind in values.PACKED else 1  # else one is enough for all threads
        return values.typed(np.full(count, bits, values.UNSIGNED[size]), kind)

    def _constant(self, source: Operand) -> int:
        if isinstance(source, Immediate):
            return source.bits
        if isinstance(source, Symbol) and source.name in ("global_smem", self._program.depot[0]):
            return 0
        raise PtxError(f"{self._program.name}: unknown operand: {source}")

    def _write(self, result: Operand, numbers: Array, kind: str) -> None:
        if not isinstance(result, Register):
            raise PtxError(f"{self._program.name}: cannot write {result}")
        dtype = self._dtype(result.name)
        if kind != "pred" and values.size_of(kind) > np.dtype(dtype).itemsize:
            raise PtxError(f"{self._program.name}: {kind} does not fit into %{result.name}")
        bits = values.bits_of(numbers, kind, dtype)
        if len(bits) != self._count:
            bits = np.full(self._count, bits[0])
        if self._count == self._size:
            self._registers[result.name] = bits
            return
        if result.name not in self._registers:
            poison = np.array(_POISON, np.uint64).astype(dtype)
            self._registers[result.name] = np.full(self._size, poison)
        register = self._registers[result.name]
        if not register.flags.writeable or register.base is not None:
            register = self._registers[result.name] = register.copy()
        register[self._chosen] = bits

    # -- moves ------------------------------------------------------------------------------------

    def move(self, one: Instruction, form: list[str]) -> None:
        """``mov``: a copy, or several registers as one, or one as several."""
        (kind,), (result, source) = form, one.operands
        if kind == "pred":
            self._write(result, self._read(source, kind), kind)
            return
        bits = f"b{kind[1:]}"
        if isinstance(source, Pack):
            self._write(result, self._joined(source, bits), bits)
        elif isinstance(result, Pack):
            part = f"b{8 * values.size_of(bits) // len(result.parts)}"
            whole = np.ascontiguousarray(self._read(source, bits))
            for place, each in enumerate(result.parts):
                if each is not None:
                    halves = whole.view(values.KINDS[part]).reshape(-1, len(result.parts))
                    self._write(each, np.ascontiguousarray(halves[:, place]), part)
        else:
            self._write(result, self._read(source, bits), bits)

    def _joined(self, pack: Pack, kind: str) -> Array:
        part = f"b{8 * values.size_of(kind) // len(pack.parts)}"
        columns = []
        for each in pack.parts:
            assert each is not None
            if isinstance(each, Register) and each.name not in self._registers:
                each = Immediate(_POISON)  # a half that nobody reads
            columns.append(np.broadcast_to(self._read(each, part), self._count))
        return np.ascontiguousarray(np.stack(columns, 1)).view(values.KINDS[kind])[:, 0]

    def convert_address(self, one: Instruction, form: list[str]) -> None:
        """``cvta.local``: a thread's own memory among generic addresses."""
        if form != ["local", "u64"]:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        place = self._read(one.operands[1], "u64")
        self._write(one.operands[0], place + np.uint64(_LOCAL), "u64")

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
        memory, places = self._places(address, space, values.size_of(kind) * count)
        who, width = self._touching(), values.size_of(kind)
        for index, part in enumerate(parts):
            found = memory.load(places + index * width, width, who)
            if part is not None:
                self._write(part, values.typed(found, kind), kind)

    def store(self, one: Instruction, form: list[str]) -> None:
        space, count, kind = _access(form)
        address, source = one.operands
        assert isinstance(address, Address)
        parts = source.parts if isinstance(source, Pack) else (source,)
        if len(parts) != count:
            raise PtxError(f"{self._program.name}: operands: {one.text}")
        memory, places = self._places(address, space, values.size_of(kind) * count)
        who, width = self._touching(), values.size_of(kind)
        for index, part in enumerate(parts):
            assert part is not None
            memory.store(places + index * width, width, self._read(part, f"b{8 * width}"), who)

    def _touching(self) -> Threads:
        if isinstance(self._chosen, slice):
            return self._who
        return self._who.some(self._chosen)

    def _places(self, address: Address, space: str, width: int) -> tuple[Memory, Array]:
        if space == "shared":
            offset = self._read(address.base, "u32").astype(np.int64) + address.offset
            return self._shared, self._own(offset, width, self._shared_size, self._who.of_block)
        start = self._read(address.base, "u64") + np.uint64(address.offset & (2**64 - 1))
        if not space and (start >= _LOCAL).all():
            depot = self._program.depot[1]
            return self._local, self._own(
                (start - np.uint64(_LOCAL)).astype(np.int64), width, depot, 1
            )
        return self._global.memory, self._global.places(start, width)

    def _own(self, offset: Array, width: int, size: int, threads: int) -> Array:
        """Places in memory of which each block, or thread, has ``size`` bytes."""
        if ((offset < 0) | (offset + width > size) | (offset % width != 0)).any():
            raise OutOfBoundsError(f"{self._program.name}: of {size} bytes of its own memory")
        index = np.arange(self._size)[self._chosen] // threads
        return offset + index * size

    # -- threads together -------------------------------------------------------------------------

    def meet(self, one: Instruction, form: list[str]) -> None:
        """``bar``: all threads of a block, or of a warp."""
        if form not in (["sync"], ["warp", "sync"]):
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        of_warp = form[0] == "warp"
        self._whole(WARP if of_warp else self._who.of_block, one)
        self._who.meetings[self._chosen] += 1
        if not of_warp:
            self._who.barriers[self._chosen] += 1

    def _whole(self, size: int, one: Instruction) -> None:
        """That groups of so many threads are here altogether."""
        if isinstance(self._chosen, slice):
            return
        together = len(self._chosen) % size == 0
        if together:
            groups = self._chosen.reshape(-1, size)
            together = bool((groups[:, 0] % size == 0).all())
            together &= bool((groups[:, -1] - groups[:, 0] == size - 1).all())
        if not together:
            raise DivergedError(f"{self._program.name}: {one.text}")

    def _all_lanes(self, mask: Operand, one: Instruction) -> None:
        self._whole(WARP, one)
        if (self._read(mask, "u32") != 0xFFFFFFFF).any():
            raise DivergedError(f"{self._program.name}: {one.text}")
        self._who.meetings[self._chosen] += 1

    def shuffle(self, one: Instruction, form: list[str]) -> None:
        how = form[1]
        if form not in (["sync", "bfly", "b32"], ["sync", "idx", "b32"]) or len(one.operands) != 5:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        result, source, which, clamp, mask = one.operands
        self._all_lanes(mask, one)
        if (self._read(clamp, "u32") != 31).any():
            raise PtxError(f"{self._program.name}: segments: {one.text}")
        lanes = np.arange(self._count, dtype=np.int64) % WARP
        wanted = self._read(which, "u32").astype(np.int64) & (WARP - 1)
        giver = (lanes ^ wanted) if how == "bfly" else wanted
        start = np.arange(self._count) - lanes
        self._write(result, self._read(source, "b32")[start + giver], "b32")

    def reduce(self, one: Instruction, form: list[str]) -> None:
        name, kind = form[1], form[-1]
        known = _REDUCED.get(kind, ())
        if form != ["sync", name, kind] or name not in known:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        result, source, mask = one.operands
        self._all_lanes(mask, one)
        lanes = self._read(source, kind).reshape(-1, WARP)
        combine = TABLE[f"{name}.{kind}"].function
        found = lanes[:, 0]
        for lane in range(1, WARP):
            found = combine(found, lanes[:, lane])
        self._write(result, np.repeat(found, WARP), kind)

    def load_matrices(self, one: Instruction, form: list[str]) -> None:
        """``ldmatrix``: of each matrix, 8 lanes say where its rows of 16 bytes lie, and each lane
        gets the 4 bytes of its place in them."""
        count = {"x1": 1, "x2": 2, "x4": 4}.get(form[3])
        if [*form[:3], *form[4:]] != ["sync", "aligned", "m8n8", "shared", "b16"] or not count:
            raise PtxError(f"{self._program.name}: unknown instruction: {one.text}")
        self._whole(WARP, one)
        result, address = one.operands
        assert isinstance(result, Pack) and isinstance(address, Address)
        memory, rows = self._places(address, "shared", 16)
        lanes = np.arange(self._count, dtype=np.int64) % WARP
        start = np.arange(self._count) - lanes
        who = self._touching()
        for matrix, part in enumerate(result.parts):
            assert part is not None
            row = rows[start + 8 * matrix + lanes // 4]
            self._write(part, memory.load(row + lanes % 4 * 4, 4, who), "b32")
        self._who.meetings[self._chosen] += 1


_TOGETHER: dict[str, Callable[[_Turns, Instruction, list[str]], None]] = {
    "mov": _Turns.move,
    "cvta": _Turns.convert_address,
    "ld": _Turns.load,
    "st": _Turns.store,
    "bar": _Turns.meet,
    "shfl": _Turns.shuffle,
    "redux": _Turns.reduce,
    "ldmatrix": _Turns.load_matrices,
}
"""Instructions that are no function of registers alone."""


def _access(form: list[str]) -> tuple[str, int, str]:
    """Space, how many numbers, and their kind."""
    *flags, kind = form
    space = flags.pop(0) if flags and flags[0] in ("global", "shared", "param") else ""
    count = int(flags.pop(0)[1:]) if flags and flags[0] in ("v2", "v4", "v8") else 1
    if flags:
        raise PtxError(f"unknown access: {'.'.join(form)}")
    return space, count, kind
