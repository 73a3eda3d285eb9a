"""What a step by the Triton kernels takes of the host, and what it copies to the device, as JSON:
microseconds of a thread's own time in a steady step (a tenth of the steps takes less), and copies.

No GPU is asked: kernels are compiled for sm_90, and a stand-in for the driver does nothing with
their launches. Tensors lie in host memory, so a copy costs less here than where it is queued.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptx.kernels import MachineBackend  # isort: skip  (before what interprets kernels)

import torch
from torch import Tensor, nn
from triton.runtime import JITFunction

import mp_optim
from mp_optim.core import CachedTensorList
from mp_optim.kernels.element_rules import AdamScalars
from mp_optim.kernels.kernel_args import TensorLists
from mp_optim.kernels.triton.tables import Tables
from ptx.triton_driver import Function, Launch, StaticDriver

COUNTS = (1, 1000)
ROUNDS, WARM = 200, 20
FIRST, SCHEDULE = 8, 1000
"""Steps of a schedule, and those by which all that it has has happened once."""
GROUP = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "bias_correction": True,
    "adam_w_mode": True,
}


class NoDriver(StaticDriver):
    """Launches nothing; what Triton asks before a launch it answers at once.

    Attributes:
        loaded: kernels, each compiled or read from Triton's cache.
    """

    loaded = 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return _nothing

    def load_binary(self, *arguments: Any) -> tuple[object, Function, int, int, int]:
        self.loaded += 1
        return super().load_binary(*arguments)


def _nothing(*_: Any) -> None: ...


def _refuse(launch: Launch) -> None:
    raise AssertionError(launch.function.name)


class CountedTables(Tables):
    """Counts copies to the device."""

    copies = 0

    def upload(self, table: Tensor, device: torch.device) -> Tensor:
        self.copies += 1
        return super().upload(table, device)


def backend_of() -> MachineBackend:
    backend = MachineBackend()
    backend.tables = CountedTables()
    return backend


def tensors(count: int, dtype: torch.dtype) -> CachedTensorList:
    return CachedTensorList(torch.full((64,), 0.5, dtype=dtype) for _ in range(count))


def steady_lists(count: int) -> tuple[TensorLists, list[list[Tensor]]]:
    """Lists of AdamW with FP32 state beside bfloat16 parameters, and two sets of gradients."""
    state = {key: tensors(count, torch.float32) for key in ("exp_avg", "exp_avg_sq")}
    grads = [list(tensors(count, torch.bfloat16)) for _ in range(2)]
    mains, outputs = tensors(count, torch.float32), tensors(count, torch.bfloat16)
    return TensorLists(mains, [], state, outputs, prepared={}), grads


def timed(backend: Any, work: Callable[[int], object]) -> dict[str, float]:
    """Microseconds and copies of a round, once everything is there."""
    times = []
    for number in range(WARM + ROUNDS):
        if number == WARM:
            before = backend.tables.copies
        started = time.thread_time_ns()
        work(number)
        times.append(time.thread_time_ns() - started)
    copies = (backend.tables.copies - before) / ROUNDS
    return {"us": statistics.quantiles(times[WARM:], n=10)[0] / 1e3, "copies": copies}


def launch(count: int) -> dict[str, float]:
    """A backend's call, with a new list of gradients each time."""
    backend, (lists, grads) = backend_of(), steady_lists(count)

    def step(number: int) -> None:
        given = replace(lists, grad=CachedTensorList(grads[number % 2]))
        backend.step("adam", given, AdamScalars.at({**GROUP, "lr": 1e-3}, number + 1), 0.37)

    return timed(backend, step)


def optimizer(count: int) -> dict[str, float]:
    """A step of ``FusedAdam`` over FP32 parameters, whose gradients are new tensors each time."""
    backend = backend_of()
    params = [nn.Parameter(torch.ones(64)) for _ in range(count)]
    grads = [[torch.ones(64) for _ in params] for _ in range(2)]
    stepped = mp_optim.FusedAdam(params, lr=1e-3)

    def step(number: int) -> None:
        stepped.step()

    def given(number: int) -> None:
        for param, grad in zip(params, grads[number % 2], strict=True):
            param.grad = grad
        step(number)

    chosen = "mp_optim.rules.rule_executor.choose_backend"
    with mock.patch(chosen, lambda name, device: (backend, "")):
        return timed(backend, given)


def schedule(driver: NoDriver) -> dict[str, int]:
    """Kernels that are loaded in the first steps of a schedule, and in all of it, and how often
    Triton was asked for one: two groups whose multipliers lie beside each other on the device,
    rates that change, gradients that are missing now and then."""
    backend, groups = backend_of(), [steady_lists(4) for _ in range(2)]
    controls, before = torch.tensor([[0.37, 0.0], [0.5, 0.0]]), driver.loaded
    found, run, asked = {}, JITFunction.run, []

    def counted(kernel: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(kernel)
        return run(kernel, *arguments, **named)

    JITFunction.run = counted
    for number in range(SCHEDULE):
        scalars = AdamScalars.at({**GROUP, "lr": 1e-3 / (1 + number)}, number + 1)
        for (lists, grads), control in zip(groups, controls, strict=True):
            given = replace(lists, grad=CachedTensorList(grads[number % 2]))
            if number % 7 == 3:
                given = given.take([0, 2, 3])
            backend.sum_of_squares(given.grad)
            backend.step("adam", given, scalars, control)
        if number + 1 in (FIRST, SCHEDULE):
            found[f"kernels after {number + 1} steps"] = driver.loaded - before
            found[f"asked after {number + 1} steps"] = len(asked)
    JITFunction.run = run
    return found


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with NoDriver(90, _refuse) as driver:
        assert isinstance(driver, NoDriver)
        found["schedule"] = schedule(driver)
        for count in COUNTS if sys.argv[1:] != ["schedule"] else ():
            found[f"launch of {count}"] = launch(count)
            found[f"FusedAdam of {count}"] = optimizer(count)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
