"""Our kernels for AMD's GPUs, as far as Triton's back end goes without one: compiled, read, and
never run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptx.kernels import MachineBackend  # isort: skip  (before what interprets kernels)

import triton
from triton.backends.compiler import GPUTarget

from ptx import record
from ptx.amdgcn import Amdgcn, read
from ptx.forms import Form, form_of
from ptx.record import table
from ptx.tables import state_of
from ptx.trials import Trial, launches_of
from ptx.triton_driver import Carry, Function, Launch, StaticDriver

TARGETS = {"gfx942": 65536, "gfx950": 163840}
"""MI300X and MI355X; bytes of memory that a block may have."""
_LANES = 64


@dataclass(frozen=True)
class AmdFunction(Function):
    """A kernel as it would be loaded; ``ptx`` is AMD's text.

    Attributes:
        ir: the kernel in LLVM.
    """

    ir: str = ""


class AmdDriver(StaticDriver):
    """A driver whose device nobody has: launches are noted, and nothing carries them out."""

    def __init__(self, target: str, carry: Carry) -> None:
        super().__init__(int(target.removeprefix("gfx"), 16), carry)
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.target, _LANES)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": TARGETS[self.target]}

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[object, Function, int, int, int]:
        text, ir = (Path(self._files[suffix]).read_text() for suffix in (".amdgcn", ".llir"))
        return self, AmdFunction(name, text, binary, ir=ir), 0, 0, 1024


@dataclass(frozen=True)
class Card:
    """What a data sheet says.

    Attributes:
        target: its. units: compute units, each of which issues one instruction of 64 threads in a
            clock. clock: GHz. bandwidth: of its memory, in TB/s.
    """

    name: str
    target: str
    units: int
    clock: float
    bandwidth: float

    def picoseconds(self, num_bytes: float, instructions: float) -> float:
        """For an element: the longer of moving its bytes and issuing its instructions."""
        issued = self.units * _LANES * self.clock * 1e9
        return 1e12 * max(num_bytes / (self.bandwidth * 1e12), instructions / issued)


CARDS = (Card("MI300X", "gfx942", 304, 2.1, 5.3), Card("MI355X", "gfx950", 256, 2.4, 8.0))


class Reading:
    """What every launch of some trials compiles to.

    Attributes:
        forms: what each form was read as. rows: a launch of each kernel and state, and its text.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.backend = MachineBackend()
        self.forms: dict[Form, Amdgcn] = {}
        self.rows: dict[tuple[str, str], tuple[Launch, Amdgcn]] = {}
        self._trial: Trial | None = None

    def read(self, trials: Sequence[Trial]) -> None:
        """Compile what the trials launch."""
        with AmdDriver(self.target, self._note):
            for self._trial in trials:
                launches_of(self.backend, self._trial)

    def _note(self, launch: Launch) -> None:
        self.backend.pass_by(launch)
        form, function = form_of(launch), launch.function
        assert isinstance(function, AmdFunction) and self._trial is not None
        if form not in self.forms:
            self.forms[form] = read(function.ptx, function.ir)
        if self._trial.case.aligned and self._trial.control == "host":
            is_sum = function.name.endswith("_sums") and function.name != "clip_sums"
            key = function.name, "" if is_sum else state_of(self._trial)
            self.rows.setdefault(key, (launch, self.forms[form]))

    def faults(self) -> dict[str, list[str]]:
        """Forms with other arithmetic, by what is wrong."""
        found: dict[str, list[str]] = {}
        for form, code in self.forms.items():
            for fault in code.faults:
                found.setdefault(fault, []).append(str(form))
        return found


def _cost(launch: Launch, code: Amdgcn) -> tuple[float, float]:
    """Instructions and bytes of an element; zeros where there is no loop."""
    rows: Any = dict(form_of(launch).constants).get("ROWS")
    if rows is None or not code.loop:
        return 0.0, 0.0
    blocks = 8 if launch.function.name == "lamb_moments" else int(rows)
    elements = blocks * 256 / (_LANES * launch.warps)
    return code.loop / elements, code.loop_bytes / elements


def _tables(readings: Sequence[Reading]) -> Iterator[tuple[str, list[str], list[list[object]]]]:
    """Name, heads and rows: what is read, and what it predicts for cards."""
    heads = [f"registers, waves: {reading.target}" for reading in readings]
    heads += ["instructions an element", "bytes an element", "16 bytes at a time", "barriers"]
    heads += ["scratch", "divisions, roots", "fused"]
    yield "amd", ["kernel", "state", *heads], list(_rows(readings))
    cards = [card for card in CARDS for reading in readings if reading.target == card.target]
    heads = [f"{card.name}, ms" for card in cards]
    yield "amd_predicted", ["kernel", "state", *heads], list(_predictions(readings, cards))


def _summary(reading: Reading) -> str:
    wrong = {form for forms in reading.faults().values() for form in forms}
    found = f"{len(wrong)} with other arithmetic" if wrong else "the arithmetic is that of the text"
    return f"{len(reading.forms)} forms, by Triton {triton.__version__}; {found}"


def lines(readings: Sequence[Reading]) -> Iterator[str]:
    """What was found: a line for each target, faults, and two tables of Markdown."""
    for reading in readings:
        yield f"{reading.target}: {_summary(reading)}"
        for fault, forms in reading.faults().items():
            yield f"  {fault}: {len(forms)} forms, such as {forms[0]}"
    for _, heads, rows in _tables(readings):
        yield from table(heads, rows)


def note(readings: Sequence[Reading]) -> None:
    """Record what was found."""
    for reading in readings:
        record.note(reading.target, "compiled", _summary(reading))
        record.note(reading.target, "read", f"{len(reading.forms)} forms")
        timed = sum(bool(_cost(*each)[0]) for each in reading.rows.values())
        record.note(reading.target, "predicted", f"{timed} kernels")
    for name, heads, rows in _tables(readings):
        record.note_table(name, heads, rows)


def _rows(readings: Sequence[Reading]) -> Iterator[list[object]]:
    for key in readings[0].rows:
        found = [reading.rows[key] for reading in readings]
        codes = [code for _, code in found]
        instructions, num_bytes = zip(*(_cost(*each) for each in found), strict=True)
        yield [
            *key,
            *(f"{code.vectors}, {code.waves}" for code in codes),
            _range(map(round, instructions)),
            f"{num_bytes[0]:.1f}" if num_bytes[0] else "-",
            f"{codes[0].wide:.0%}" if num_bytes[0] else "-",
            _range(code.barriers for code in codes),
            _range(code.scratch for code in codes),
            f"{codes[0].divisions}, {codes[0].roots}",
            _range(code.fused for code in codes),
        ]


def _range(numbers: Any) -> str:
    every = list(numbers)
    return str(every[0]) if min(every) == max(every) else f"{min(every)} to {max(every)}"


def _predictions(readings: Sequence[Reading], cards: Sequence[Card]) -> Iterator[list[object]]:
    by_target = {reading.target: reading for reading in readings}
    for key in readings[0].rows:
        costs = [_cost(*by_target[card.target].rows[key]) for card in cards]
        if not costs or not costs[0][0]:
            continue
        cells = []
        for card, (instructions, num_bytes) in zip(cards, costs, strict=True):
            time = card.picoseconds(num_bytes, instructions)
            bound = "" if card.picoseconds(num_bytes, 0.0) == time else ", by instructions"
            cells.append(f"{time:.2f}{bound}")
        yield [*key, *cells]
