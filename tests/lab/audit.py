"""Flip bits under audited steps, and count what is noticed; take clean steps, and count alarms; and
measure what audits cost. The table of docs/audit.md.

$ python tests/lab audit
$ python tests/lab audit --flips 0 --clean 1000000 --pairs 0
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mp_optim
from mp_optim.kernels.kernel_args import MAIN, TensorLists
from support.faults import faulty, flip, read, upper_bit

KINDS = ("gradient", "moment", "main param", "parameter", "resting state")
_COLUMNS = {"gradient": "grad", "moment": "exp_avg", "main param": MAIN, "parameter": "output"}
_TENSORS, _ELEMENTS = 32, 8192


@dataclass
class Options:
    """How much of each."""

    flips: int = 100_000
    """Transient flips."""
    stuck: int = 2_000
    """Elements that are written wrongly in each step until that is noticed."""
    rate: float = 0.01
    """Share of the elements that a step of these repeats."""
    clean: int = 100_000
    """Steps without a flip, with everything repeated."""
    pairs: int = 40
    """Pairs of 10 steps of 50 million elements, with audits at 1e-4 and without."""
    seed: int = 0


Place = tuple[int, int]
"""Number of a parameter, and of an element of it."""


def main(options: Options) -> int:
    """Returns the exit status: not 0 if there was a false alarm, or what is noticed is not as the
    rate says."""
    failed = False
    if options.flips:
        failed |= transient(options)
    if options.stuck:
        failed |= lasting(options)
    if options.clean:
        failed |= clean(options)
    if options.pairs:
        cost(options)
    return int(failed)


# -- flips ----------------------------------------------------------------------------------------


class Trial:
    """A small model whose steps are audited."""

    def __init__(self, rate: float) -> None:
        torch.manual_seed(0)
        self.params = [
            nn.Parameter(torch.randn(_ELEMENTS).bfloat16(), requires_grad=True)
            for _ in range(_TENSORS)
        ]
        named = [(f"w{index}", param) for index, param in enumerate(self.params)]
        self.optimizer = mp_optim.AdamW(named, lr=1e-3, audit_rate=rate)
        for param in self.params:
            param.grad = torch.randn_like(param)
        self.optimizer.step()

    def step(self) -> set[Place]:
        """Take a step; the elements that an alarm names."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.optimizer.step()
        named = set()
        for each in caught:
            assert isinstance(each.message, mp_optim.AuditWarning), each.message
            for mismatch in each.message.mismatches:
                named.add((int(mismatch.param[1:]), mismatch.element))
        return named


def transient(options: Options) -> bool:
    """Flips that happen once, a few in each step; prints a line for each kind."""
    trial, dice = Trial(options.rate), random.Random(options.seed)
    noticed = {kind: [0, 0] for kind in KINDS}
    by_step: dict[str, list[int]] = {kind: [] for kind in KINDS}
    strangers = 0
    while sum(count for count, _ in noticed.values()) < options.flips:
        of_kind = {kind: _places(dice, 4) for kind in KINDS}
        for index, element in of_kind["resting state"]:
            moment = trial.optimizer.state[trial.params[index]]["exp_avg_sq"]
            flip(moment, element, upper_bit(moment))
        with faulty(_once(of_kind)):
            named = trial.step()
        for kind, places in of_kind.items():
            found = len(named.intersection(places))
            noticed[kind][0] += len(places)
            noticed[kind][1] += found
            by_step[kind].append(found)
        strangers += len(named.difference(itertools.chain(*of_kind.values())))
    failed = strangers > 0
    print(f"transient flips, rate {options.rate:g} (elements named without a flip: {strangers})")
    for kind, (flips, found) in noticed.items():
        share, per_step = found / flips, flips / len(by_step[kind])
        error = statistics.stdev(by_step[kind]) / per_step / math.sqrt(len(by_step[kind]))
        off = (share - options.rate) / max(error, 1e-12)
        failed |= abs(off) > 4.0
        print(f"  {kind}: {flips} flips, {found} noticed: {share:.5f} +- {error:.5f}")
    return failed


def _places(dice: random.Random, count: int) -> list[Place]:
    return [(dice.randrange(_TENSORS), dice.randrange(_ELEMENTS)) for _ in range(count)]


def _once(of_kind: dict[str, list[Place]]) -> Callable[[TensorLists], Callable[[], None]]:
    """Flips of gradients, moments and main params as they are read, and of parameters as they are
    written."""

    def before(lists: TensorLists) -> Callable[[], None]:
        for kind in ("gradient", "moment", "main param"):
            for index, element in of_kind[kind]:
                tensor = read(lists, _COLUMNS[kind])[index]
                flip(tensor, element, upper_bit(tensor))

        def after() -> None:
            for index, element in of_kind["gradient"]:
                flip(lists.grad[index], element, upper_bit(lists.grad[index]))
            for index, element in of_kind["parameter"]:
                output = lists.output[index]
                assert output is not None
                flip(output, element, upper_bit(output))

        return after

    return before


def lasting(options: Options) -> bool:
    """Elements whose main param is always written wrongly: how many steps until an alarm."""
    trial, dice = Trial(options.rate), random.Random(options.seed + 1)
    begun: dict[Place, int] = {}
    waited: list[int] = []
    step = 0

    def before(lists: TensorLists) -> Callable[[], None]:
        def after() -> None:
            for index, element in begun:
                flip(lists.main[index], element, 3)

        return after

    with faulty(before):
        while len(waited) < options.stuck:
            while len(begun) < 64:
                begun.setdefault(_places(dice, 1)[0], step)
            step += 1
            for place in trial.step():
                waited.append(step - begun.pop(place))
    mean, predicted = statistics.fmean(waited), 1.0 / options.rate
    within = sum(steps <= 3.0 * predicted for steps in waited) / len(waited)
    print(
        f"stuck elements, rate {options.rate:g}: {len(waited)} noticed after {mean:.1f} steps on "
        f"average (predicted {predicted:.0f}), {within:.3f} of them within three times that "
        f"(predicted {1 - math.exp(-3):.3f})"
    )
    return abs(mean / predicted - 1.0) > 0.2


# -- clean steps ----------------------------------------------------------------------------------

_RULES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "adamw": (mp_optim.AdamW, {}),
    "sgd": (mp_optim.SGD, {"momentum": 0.9}),
    "lion": (mp_optim.Lion, {}),
}
_FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"state": "8bit", "main_params": "remainder16"},
    {"state": "bf16", "main_params": "none"},
    {"state": "4bit", "main_params": "remainder8", "stochastic_rounding": True},
)
_PLACES: tuple[dict[str, Any], ...] = (
    {},
    {"offload": 1.0},
    {"offload": 1.0, "offload_mode": "speculative"},
    {"offload": 1.0, "offload_place": "streamed", "stream_window_bytes": 4096},
)


def _stacks() -> Iterator[tuple[list[Tensor], Any]]:
    """Rules, forms and places, each with each, over tiny tensors."""
    for (cls, settings), form, place in itertools.product(_RULES.values(), _FORMS, _PLACES):
        shapes = ((7, 40), (300,), (), (3,))
        params: list[Tensor] = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
        given = {**settings, **form, **place}
        if cls is mp_optim.SGD and form.get("state") == "8bit":
            given["main_params"] = "remainder16"
        yield (params, cls(params, lr=1e-3, audit_rate=1.0, audit_action="raise", **given))


def clean(options: Options) -> bool:
    """Steps of small models, all of which is repeated; an alarm is an AuditError."""
    torch.manual_seed(options.seed)
    stacks = list(_stacks())
    each, alarms, elements, steps = -(-options.clean // len(stacks)), 0, 0.0, 0
    for params, optimizer in stacks:
        grads = [[torch.randn_like(param) for param in params] for _ in range(8)]
        try:
            for number in range(each):
                for param, grad in zip(params, grads[number % 8], strict=True):
                    param.grad = grad
                optimizer.step()
                steps += 1
        except mp_optim.AuditError as error:
            alarms += 1
            print(f"  {error}")
        elements += optimizer.metrics()["audited_elements"]
    print(
        f"clean steps: {steps} by {len(stacks)} stacks, {elements:.3g} elements repeated, "
        f"{alarms} alarms"
    )
    return alarms > 0


# -- what it costs --------------------------------------------------------------------------------


def cost(options: Options, elements: int = 50_331_648, tensors: int = 64) -> None:
    """Steps with audits at 1e-4 and without, in turn: seconds, and seconds of CPUs."""
    params = [
        nn.Parameter(torch.randn(elements // tensors, dtype=torch.bfloat16).view(-1, 512))
        for _ in range(tensors)
    ]
    optimizer = mp_optim.AdamW(params, lr=1e-3, audit_rate=1e-4)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    executor: Any = optimizer.stack.optimizer.executor  # type: ignore[attr-defined]
    audit, walls, cpus = executor.audit, [], []
    for number in range(options.pairs):
        wall, cpu = {}, {}
        for is_on in (True, False) if number % 2 else (False, True):
            executor.audit = audit if is_on else None
            began = time.perf_counter(), time.process_time()
            for _ in range(10):
                optimizer.step()
            wall[is_on] = time.perf_counter() - began[0]
            cpu[is_on] = time.process_time() - began[1]
        walls.append(wall[True] / wall[False])
        cpus.append(cpu[True] / cpu[False])
    for name, ratios in (("time", walls), ("CPU time", cpus)):
        quarters = statistics.quantiles(ratios, n=4)
        print(
            f"{elements} elements, audit_rate=1e-4: {name} with audits over {name} without: "
            f"{quarters[1]:.4f} (quartiles {quarters[0]:.4f} to {quarters[2]:.4f}, "
            f"{len(ratios)} pairs)"
        )
