"""Tables of the kernels' machine code, by target, and of the time that it predicts for cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptx.kernels import MachineBackend  # isort: skip  (before what interprets kernels)

from ptx.forms import form_of
from ptx.sass import CARDS, Assembled, assembled
from ptx.trials import Trial, launches_of
from ptx.triton_driver import Launch, StaticDriver

_HEAD = (
    "| kernel | state | elements a thread | registers | stack | warps | instructions an element "
    "| bytes an element | in 16 bytes at a time | barriers | fused |"
)


def _kernels(trials: Sequence[Trial], arch: int) -> dict[tuple[str, str], tuple[Launch, Assembled]]:
    """By kernel and what it is launched on: a launch, and its machine code."""
    found: dict[tuple[str, str], tuple[Launch, Assembled]] = {}
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
                state = "" if name.endswith("_sums") and name != "clip_sums" else _state(trial)
                if (name, state) not in found:
                    code = assembled(launch.function, arch, launch.warps)
                    found[name, state] = launch, code
    return found


def _state(trial: Trial) -> str:
    return str(trial).partition(": ")[2].removesuffix(", aligned, host")


def _elements(launch: Launch) -> int:
    """Of a thread, in one turn of a kernel's loop."""
    rows = dict(form_of(launch).constants).get("ROWS")
    if rows is None:
        return 0
    return (8 if launch.function.name == "lamb_moments" else int(rows)) * 8 // launch.warps


def tables(trials: Sequence[Trial], arches: Sequence[int]) -> Iterator[str]:
    """Lines of Markdown, for aligned tensors and a multiplier on the host."""
    chosen = [trial for trial in trials if trial.case.aligned and trial.control == "host"]
    costs: dict[int, dict[tuple[str, str], tuple[float, float]]] = {}
    for arch in arches:
        costs[arch] = {}
        yield from ("", f"**sm_{arch}**", "", _HEAD, "|---" * 11 + "|")
        for key, (launch, code) in _kernels(chosen, arch).items():
            elements = _elements(launch)
            cost = (0.0, 0.0)
            if elements and code.loop:
                cost = code.loop / elements, code.loop_bytes / elements
                costs[arch][key] = cost
            shown = [f"{value:.1f}" if value else "-" for value in cost]
            wide = f"{code.wide:.0%}" if code.loop_bytes else "-"
            held = [code.registers, code.stack, code.warps]
            cells = [*key, elements or "-", *held, *shown, wide, code.barriers, code.fused]
            yield f"| {' | '.join(map(str, cells))} |"
    yield from _predictions(costs)


def _predictions(costs: dict[int, dict[tuple[str, str], tuple[float, float]]]) -> Iterator[str]:
    cards = [card for card in CARDS if card.arch in costs]
    if not cards:
        return
    yield from ("", "| kernel | state | " + " | ".join(card.name for card in cards) + " |")
    yield "|---" * (2 + len(cards)) + "|"
    for key in costs[cards[0].arch]:
        times = []
        for card in cards:
            instructions, num_bytes = costs[card.arch][key]
            bound = card.picoseconds(num_bytes, instructions)
            by = "memory" if card.picoseconds(num_bytes, 0.0) == bound else "instructions"
            times.append(f"{bound:.2f} ms a billion, {by}")
        yield f"| {key[0]} | {key[1]} | {' | '.join(times)} |"
