"""Print the number of kernels that the first steps of a schedule load, and of calls of Triton, as
JSON.

No GPU is used. Kernels are compiled for sm_90, and a stand-in for the driver ignores launches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptx.kernels import MachineBackend  # isort: skip  (before what interprets kernels)

import torch
from torch import Tensor
from triton.runtime import JITFunction

from mp_optim.core import CachedTensorList
from mp_optim.kernels.kernel_args import AdamScalars, TensorLists
from ptx.triton_driver import Function, Launch, StaticDriver

FIRST, SCHEDULE = 8, 1000
"""Steps after which each event of the schedule has happened once, and all steps."""
GROUP = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "bias_correction": True,
    "adam_w_mode": True,
}


class NoDriver(StaticDriver):
    """Driver that ignores all launches.

    Attributes:
        loaded: number of kernels that were compiled or read from Triton's cache.
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


def tensors(count: int, dtype: torch.dtype) -> CachedTensorList:
    return CachedTensorList(torch.full((64,), 0.5, dtype=dtype) for _ in range(count))


def steady_lists(count: int) -> tuple[TensorLists, list[list[Tensor]]]:
    state = {key: tensors(count, torch.float32) for key in ("exp_avg", "exp_avg_sq")}
    grads = [list(tensors(count, torch.bfloat16)) for _ in range(2)]
    mains, outputs = tensors(count, torch.float32), tensors(count, torch.bfloat16)
    return TensorLists(mains, [], state, outputs, prepared={}), grads


def schedule(driver: NoDriver) -> dict[str, int]:
    backend, groups = MachineBackend(), [steady_lists(4) for _ in range(2)]
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
    with NoDriver(90, _refuse) as driver:
        assert isinstance(driver, NoDriver)
        print(json.dumps(schedule(driver)))


if __name__ == "__main__":
    main()
