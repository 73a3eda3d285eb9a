"""Tables of the kernels' machine code, by target, and of the time that it predicts for cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptx.kernels import MachineBackend  # isort: skip  (before what interprets kernels)

from ptx.forms import form_of
from ptx.sass import CARDS, Assembled, Card, assembled
from ptx.trials import Trial, launches_of
from ptx.triton_driver import Launch, StaticDriver

Key = tuple[str, str]
"""A kernel's name, and what state it is launched on."""
Codes = dict[Key, tuple[Launch, Assembled]]


def _kernels(trials: Sequence[Trial], arch: int) -> Codes:
    """By kernel and what it is launched on: a launch, and its machine code."""
    found: Codes = {}
    backend = MachineBackend()
    launched: list[Launch] = []

    def note(launch: Launch) -> None:
        backend.pass_by(launch)
        launched.append(launch)

    with StaticDriver(arch, note):
        for trial in trials:
            launched.clear()
            launches_of(backend, trial)
            for launch in launched:
                name = launch.function.name
                state = "" if name.endswith("_sums") else state_of(trial)
                if (name, state) not in found:
                    code = assembled(launch.function, arch, launch.warps)
                    found[name, state] = launch, code
    return found


def state_of(trial: Trial) -> str:
    """What a trial is launched on, in words."""
    return str(trial).partition(": ")[2].removesuffix(", aligned, host")


def _elements(launch: Launch) -> int:
    """Of a thread, in one turn of a kernel's loop."""
    rows = dict(form_of(launch).constants).get("ROWS")
    if rows is None:
        return 0
    return (8 if launch.function.name == "lamb_moments" else int(rows)) * 8 // launch.warps


def _cost(launch: Launch, code: Assembled) -> tuple[float, float]:
    """Instructions and bytes of an element; zeros where there is no loop."""
    elements = _elements(launch)
    if not elements or not code.loop:
        return 0.0, 0.0
    return code.loop / elements, code.loop_bytes / elements


def tables(
    trials: Sequence[Trial], arches: Sequence[int]
) -> Iterator[tuple[str, list[str], list[list[object]]]]:
    """Name, heads and rows, for aligned tensors and a multiplier on the host: what the assembler
    makes, and the time of a billion elements that it predicts for cards."""
    chosen = [trial for trial in trials if trial.case.aligned and trial.control == "host"]
    codes = {arch: _kernels(chosen, arch) for arch in arches}
    said = ["instructions an element", "bytes an element", "16 bytes at a time", "barriers"]
    said += ["stack", "fused"]
    heads = [f"registers, warps: sm_{arch}" for arch in arches]
    yield "sass", ["kernel", "state", *heads, *said], list(_rows(codes))
    cards = [card for card in CARDS if card.arch in codes]
    heads = [f"{card.name}, ms" for card in cards]
    yield "predicted", ["kernel", "state", *heads], list(_predictions(codes, cards))


def _rows(codes: dict[int, Codes]) -> Iterator[list[object]]:
    """A row for each kernel; of numbers that differ between targets the least and the most."""
    for key in next(iter(codes.values())):
        found = [of_arch[key] for of_arch in codes.values()]
        costs = [_cost(*each) for each in found]
        assembled_ones = [code for _, code in found]
        yield [
            *key,
            *(f"{code.registers}, {code.warps}" for code in assembled_ones),
            _range([round(instructions) for instructions, _ in costs]),
            f"{costs[0][1]:.1f}" if costs[0][1] else "-",
            f"{assembled_ones[0].wide:.0%}" if costs[0][1] else "-",
            _range([code.barriers for code in assembled_ones]),
            _range([code.stack for code in assembled_ones]),
            _range([code.fused for code in assembled_ones]),
        ]


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _predictions(codes: dict[int, Codes], cards: Sequence[Card]) -> Iterator[list[object]]:
    for key in next(iter(codes.values())):
        cells = []
        for card in cards:
            instructions, num_bytes = _cost(*codes[card.arch][key])
            time = card.picoseconds(num_bytes, instructions)
            bound = "" if card.picoseconds(num_bytes, 0.0) == time else ", by instructions"
            cells.append(f"{time:.2f}{bound}")
        if cells and _cost(*codes[cards[0].arch][key])[0]:
            yield [*key, *cells]
