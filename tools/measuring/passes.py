"""What one way through the package passes: its files, its functions, and how deep they are nested.

``python passes.py NAME`` walks one of ``WALKS`` in this process and prints its figures as JSON, and
with ``--list`` its calls before that; ``python passes.py times`` times steps of tiny parameters.
The package is the one that Python finds.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import mp_optim

PACKAGE = str(Path(mp_optim.__file__).parent)
LAYERS, WIDTH = 4, 64
TINY, ROUNDS = 8, 300
"""Parameters, and steps of each optimizer, that are timed."""

Passed = dict[str, int]


class Watch:
    """Notes the calls of functions of the package, in every thread.

    Bodies of modules and classes are not calls, nor are comprehensions, which newer Pythons inline.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.codes: set[CodeType] = set()
        self.deepest = 0
        self.entered: list[str] = []
        self._depths = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not _is_counted(frame.f_code):
            return
        depth = getattr(self._depths, "value", 0) + (1 if event == "call" else -1)
        self._depths.value = depth
        if event == "call":
            self.calls += 1
            self.codes.add(frame.f_code)
            self.entered.append("  " * (depth - 1) + _place(frame.f_code))
            self.deepest = max(self.deepest, depth)

    def figures(self) -> Passed:
        return {
            "files": len({code.co_filename for code in self.codes}),
            "functions": len(self.codes),
            "calls": self.calls,
            "deepest": self.deepest,
        }


def _place(code: CodeType) -> str:
    file = Path(code.co_filename).relative_to(PACKAGE)
    name = getattr(code, "co_qualname", code.co_name)  # before Python 3.11: without its class
    return f"{name}  {file}:{code.co_firstlineno}"


def _is_counted(code: CodeType) -> bool:
    is_function = code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<")
    return bool(is_function) and code.co_filename.startswith(PACKAGE)


def passed(run: Callable[[], object]) -> Passed:
    watch = Watch()
    if hasattr(threading, "setprofile_all_threads"):
        threading.setprofile_all_threads(watch)
    else:
        threading.setprofile(watch)
        sys.setprofile(watch)
    try:
        run()
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    if "--list" in sys.argv:
        print(*watch.entered, sep="\n")
    return watch.figures()


def model_of_layers() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*layers).bfloat16()


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()


def trained(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of_layers()
    optimizer = mp_optim.AdamW(model.parameters(), lr=1e-3, **settings)
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def step() -> Iterator[tuple[str, Passed]]:
    model, optimizer = trained()
    backward(model)
    yield "step", passed(optimizer.step)


def overlap() -> Iterator[tuple[str, Passed]]:
    model, optimizer = trained(offload=0.5, offload_mode="overlap")

    def both() -> None:
        backward(model)
        optimizer.step()

    yield "backward and step, offload 0.5, overlap", passed(both)


def build() -> Iterator[tuple[str, Passed]]:
    config = mp_optim.OptimizerConfig(lr=1e-3, bf16=True)
    for which in ("first", "second"):
        model = model_of_layers()
        figures = passed(lambda model=model: mp_optim.get_megatron_optimizer(config, model))
        yield f"{which} get_megatron_optimizer of a process", figures


def state() -> Iterator[tuple[str, Passed]]:
    _, optimizer = trained()
    kept: list[dict[str, Any]] = []
    yield "state_dict", passed(lambda: kept.append(optimizer.state_dict()))
    yield "load_state_dict", passed(lambda: optimizer.load_state_dict(kept[0]))


WALKS = {"step": step, "overlap": overlap, "build": build, "state": state}


def times() -> dict[str, float]:
    params = [nn.Parameter(torch.randn(16, 4).bfloat16()) for _ in range(2 * TINY)]
    for param in params:
        param.grad = torch.randn_like(param)
    ours = mp_optim.AdamW(params[:TINY], lr=1e-3)
    theirs = torch.optim.AdamW(params[TINY:], lr=1e-3, fused=True)
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    for number in range(ROUNDS + 20):
        for name, optimizer in (("ours", ours), ("torch", theirs)):
            started = time.perf_counter()
            optimizer.step()
            if number >= 20:
                seconds[name].append(time.perf_counter() - started)
    times_longer = [a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True)]
    found = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return found | {"ratio": statistics.median(times_longer)}


if __name__ == "__main__":
    name = sys.argv[1]
    print(json.dumps(times() if name == "times" else dict(WALKS[name]())))
