#!/usr/bin/env python
"""Files, functions and calls of the package in a step, a build and a state dict, for each checkout,
and how deep these calls are nested. And the time of a step of tiny parameters.

python tools/profile_step.py . ../before
python tools/profile_step.py --walk step      # the calls themselves, in their order

Each walk is in a process of its own, on the CPU. Steps are timed in turn with torch's fused AdamW:
believe the ratio, and that only on an idle machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

import mp_optim

PACKAGE = str(Path(mp_optim.__file__).parent)
TINY, ROUNDS = 8, 300
"""Parameters, and steps of each optimizer, that are timed."""


class Watch:
    """Notes the calls of functions of the package, in every thread.

    Bodies of modules and classes are not calls, nor are comprehensions, which newer Pythons inline.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.entered: list[str] = []
        self.deepest = 0
        self._depths = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<")
        if not is_function or not code.co_filename.startswith(PACKAGE):
            return
        if event not in ("call", "return"):
            return
        depth = getattr(self._depths, "value", 0) + (1 if event == "call" else -1)
        self._depths.value = depth
        if event == "call":
            self.codes.add(code)
            self.deepest = max(self.deepest, depth)
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names.
            place = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno}"
            self.entered.append("  " * (depth - 1) + f"{name}  {place}")


def passed(run: Callable[[], object]) -> str:
    """Print the calls of the package, and return their files, functions, number and depth."""
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
    print(*watch.entered, sep="\n")
    files = {code.co_filename for code in watch.codes}
    counts = (len(files), len(watch.codes), len(watch.entered), watch.deepest)
    return " / ".join(map(str, counts))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()


def walks(name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the title and the call of each row of a walk."""
    if name == "build":
        config = mp_optim.OptimizerConfig(lr=1e-3, bf16=True)
        for which in ("first", "second"):
            model = layers()
            title = f"{which} get_megatron_optimizer of a process"
            yield title, lambda model=model: mp_optim.get_megatron_optimizer(config, model)
        return
    model = layers()
    settings = {"offload": 0.5, "offload_mode": "overlap"} if name == "overlap" else {}
    optimizer = mp_optim.AdamW(model.parameters(), lr=1e-3, **settings)
    for _ in range(3):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    if name == "step":
        backward(model)
        yield "step", optimizer.step
    elif name == "overlap":
        title = "backward and step, offload 0.5, overlap"
        yield title, lambda: (backward(model), optimizer.step())
    else:
        saved = optimizer.state_dict()
        yield "state_dict", optimizer.state_dict
        yield "load_state_dict", lambda: optimizer.load_state_dict(saved)


def times() -> str:
    params = [nn.Parameter(torch.randn(16, 4).bfloat16()) for _ in range(2 * TINY)]
    for param in params:
        param.grad = torch.randn_like(param)
    ours = mp_optim.AdamW(params[:TINY], lr=1e-3)
    theirs = torch.optim.AdamW(params[TINY:], lr=1e-3, fused=True)
    seconds: dict[Any, list[float]] = {ours: [], theirs: []}
    for _ in range(ROUNDS + 20):
        for optimizer in (ours, theirs):
            started = time.perf_counter()
            optimizer.step()
            seconds[optimizer].append(time.perf_counter() - started)
    both = zip(seconds[ours][20:], seconds[theirs][20:], strict=True)
    ratio = statistics.median(one / other for one, other in both)
    own = 1e3 * statistics.median(seconds[ours][20:])
    return f"{own:.2f} ms, {ratio:.1f} times torch's fused AdamW"


WALKS = ("step", "overlap", "build", "state", "times")


def main(
    roots: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path(),), walk: str = ""
) -> None:
    """Walk through checkouts.

    Args:
        roots: the checkouts, the newest first; by default the present folder.
        walk: print the calls of this walk through the package that Python finds, and its figures
            as JSON.
    """
    if walk == "times":
        print(json.dumps({"step of 8 tiny parameters": times()}))
        return
    if walk:
        print(json.dumps({title: passed(run) for title, run in walks(walk)}))
        return
    columns: list[dict[str, str]] = []
    for root in roots:
        columns.append({})
        variables = {**os.environ, "PYTHONPATH": str(root.resolve()), "OMP_NUM_THREADS": "1"}
        for name in WALKS:
            command = [sys.executable, __file__, "--walk", name]
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, check=True
            )
            columns[-1] |= json.loads(done.stdout.splitlines()[-1])
    table = Table("files / functions / calls / deepest", *map(str, roots))
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    tyro.cli(main)
