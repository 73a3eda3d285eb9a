"""Registers of many threads at once, and how an instruction reads and writes those of the threads
that carry it out. What its operands are is looked at once, when a kernel is decoded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx import values
from ptx.opcodes import Operation
from ptx.parser import Immediate, Instruction, Operand, Program, PtxError, Register, Symbol
from ptx.values import Array

POISON = 0xA5A5A5A5A5A5A5A5
"""What a register holds that was not written yet."""
SPECIAL = ("%tid.x", "%ctaid.x", "%ntid.x", "%laneid")


class Lanes:
    """Registers of ``size`` threads, as bits, of which some are chosen.

    Attributes:
        special: those of :data:`SPECIAL`.
        chosen: a slice, or numbers of threads; they are ``count``.
    """

    def __init__(self, size: int, special: dict[str, Array]) -> None:
        self.size, self.special = size, special
        self.registers: dict[str, Array] = {}
        self.chosen: Array | slice = slice(0, size)
        self.count = size

    def choose(self, chosen: Array | slice) -> None:
        self.chosen = chosen
        is_slice = isinstance(chosen, slice)
        self.count = chosen.stop - chosen.start if is_slice else len(chosen)

    def put(self, name: str, bits: Array) -> None:
        if len(bits) != self.count:
            bits = np.full(self.count, bits[0])
        if self.count == self.size:
            self.registers[name] = bits
            return
        register = self.registers.get(name)
        if register is None:
            poison = np.array(POISON, np.uint64).astype(bits.dtype)
            register = self.registers[name] = np.full(self.size, poison)
        register[self.chosen] = bits


Reader = Callable[[Lanes], Array]
Writer = Callable[[Lanes, Array], None]


def dtype_of(program: Program, name: str) -> type:
    """Of a register's bits.

    Raises:
        PtxError: there is no such register.
    """
    declared = program.kinds.get(name.rstrip("0123456789"))
    if declared is None:
        raise PtxError(f"{program.name}: unknown register: %{name}")
    kind = values.KINDS[declared]
    return np.bool_ if kind is np.bool_ else values.UNSIGNED[np.dtype(kind).itemsize]


def constant(program: Program, source: Operand) -> int:
    if isinstance(source, Immediate):
        return source.bits
    if isinstance(source, Symbol) and source.name in ("global_smem", program.depot[0]):
        return 0
    raise PtxError(f"{program.name}: unknown operand: {source}")


def reader(program: Program, source: Operand, kind: str) -> Reader:
    if isinstance(source, Register):
        return _register_reader(program, source.name, kind)
    if isinstance(source, Symbol) and source.name in SPECIAL:
        name = source.name
        return lambda lanes: values.typed(lanes.special[name][lanes.chosen], kind)
    if kind == "pred" and isinstance(source, Immediate):
        truth = np.array([source.bits != 0])
        return lambda lanes: truth
    size = values.size_of(kind)
    unsigned = values.UNSIGNED[size]
    bits = constant(program, source) & ((1 << 8 * size) - 1)
    if kind in values.PACKED:
        return lambda lanes: values.typed(np.full(lanes.count, bits, unsigned), kind)
    number = values.typed(np.full(1, bits, unsigned), kind)
    return lambda lanes: number


def _register_reader(program: Program, name: str, kind: str) -> Reader:
    is_pred = kind == "pred"
    unsigned = np.bool_ if is_pred else values.UNSIGNED[values.size_of(kind)]
    number = values.KINDS[values.PACKED.get(kind, (kind,))[0]]
    has_width = dtype_of(program, name) is unsigned

    def read(lanes: Lanes) -> Array:
        bits = lanes.registers.get(name)
        if bits is None:
            raise PtxError(f"{program.name}: %{name} is read before it is written")
        bits = bits[lanes.chosen]
        if not has_width:
            bits = bits.astype(unsigned)
        return bits.view(number)

    return read


def writer(program: Program, result: Operand, kind: str) -> Writer:
    if not isinstance(result, Register):
        raise PtxError(f"{program.name}: cannot write {result}")
    name, dtype = result.name, dtype_of(program, result.name)
    if kind != "pred" and values.size_of(kind) > np.dtype(dtype).itemsize:
        raise PtxError(f"{program.name}: {kind} does not fit into %{name}")

    def write(lanes: Lanes, numbers: Array) -> None:
        lanes.put(name, values.bits_of(numbers, kind, dtype))

    return write


def computing(program: Program, one: Instruction, operation: Operation) -> Callable[[Lanes], None]:
    result, *sources = one.operands
    if len(sources) != len(operation.operands):
        raise PtxError(f"{program.name}: operands: {one.text}")
    pairs = zip(sources, operation.operands, strict=True)
    readers = [reader(program, source, kind) for source, kind in pairs]
    write, function = writer(program, result, operation.result), operation.function

    def compute(lanes: Lanes) -> None:
        write(lanes, function(*[read(lanes) for read in readers]))

    return compute
