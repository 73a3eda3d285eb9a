"""Train random stacks in processes whose memory is limited, and compare the memory that they take
with the plan. No process may be killed: a plan that does not fit is an error.

$ python tests/lab host-memory --plans 200

Each plan is a process in a memory cgroup of its own, so this needs a writable cgroup (root in most
containers).
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mp_optim
from mp_optim.factory.build import StackRequest
from mp_optim.factory.host_memory_check import BESIDE, SWITCH, in_host_memory
from mp_optim.factory.offload_fraction import rank_planner

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
)
_LAYERS, _WIDTH = 64, 700
_TRUE_WITHIN = 0.02
"""Share of the resident bytes of a process."""
_FILE = "optimizer_state_path"
"""With a file the plan is an upper bound, as pages of its windows that nothing wrote are not
resident; and the pages of the file itself, which the system drops on demand, are not counted."""

# glibc keeps memory that was freed for the thread that allocated it: with an arena for each thread
# some gradients were resident twice, up to 7 % of a plan. So the process has one arena.

_WITHOUT_HUGE_PAGES = 41
"""PR_SET_THP_DISABLE of prctl: a plan does not count the rest of a huge page."""


@dataclass
class Options:
    """How much."""

    plans: int = 200
    """Number of plans, each a process."""
    seed: int = 0
    """Number of the first plan; each other is one more."""
    one: str = ""
    """Carry out this plan in this process, and print what became of it. For the tool itself."""


def main(options: Options) -> int:
    """Carry out the plans. Returns the exit status: 1 if a process was killed, a plan was wrong, or
    an error was not a refusal."""
    if options.one:
        print(json.dumps(_carry_out(json.loads(options.one))))
        return 0
    found: dict[str, int] = {"trained": 0, "refused": 0, "killed": 0, "wrong": 0}
    worst = 0.0
    for seed in range(options.seed, options.seed + options.plans):
        plan = _draw(random.Random(f"host memory {seed}"))
        kind, detail, off = _in_cgroup(plan, f"mp_optim_plan_{os.getpid()}")
        worst = max(worst, abs(off))
        found[kind] += 1
        if kind in ("killed", "wrong"):
            print(f"seed {seed}: {kind}: {detail}\n  {plan}", flush=True)
    print(f"{options.plans} plans: {found}; largest difference from a plan {worst:.2%}")
    return int(bool(found["killed"] or found["wrong"]))


def _draw(draw: random.Random) -> dict[str, Any]:
    """Draw settings, and the share of their plan that is granted."""
    settings: dict[str, Any] = {
        "state": draw.choice(("fp32", "bf16", "8bit", "4bit")),
        "main_params": draw.choice(("fp32", "remainder16", "remainder8")),
    }
    if draw.random() < 0.3:
        settings["ema_decay"] = 0.99
    if draw.random() < 0.8:
        settings["offload"] = draw.choice((0.5, 0.75, 1.0))
        settings["offload_mode"] = draw.choice(("sync", "overlap", "speculative"))
        settings["offload_place"] = draw.choice(("host", "streamed"))
        if draw.random() < 0.3:
            settings[_FILE] = tempfile.gettempdir()
        settings["stream_window_bytes"] = draw.choice((8 << 20, 32 << 20))
    return {"settings": settings, "granted": draw.choice((0.5, 0.8, 0.95, 1.1, 1.3, 2.0))}


def _in_cgroup(plan: dict[str, Any], name: str) -> tuple[str, str, float]:
    """Carry out a plan in a process. Returns trained, refused, killed or wrong, in words why, and
    how far the memory taken is from the plan."""
    root, limit, usage = next(each for each in _CGROUPS if (each[0] / each[1]).parent.exists())
    group = root / name
    group.mkdir(exist_ok=True)
    try:
        given = plan | {"group": str(group), "limit": limit, "usage": usage}
        command = [sys.executable, "tests/lab", "host-memory", "--one", json.dumps(given)]
        environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    finally:
        group.rmdir()
    if done.returncode == -signal.SIGKILL:
        return "killed", "by the system, for memory", 0.0
    if done.returncode:
        return "wrong", done.stderr.strip().splitlines()[-1], 0.0
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if "refused" in found:
        is_right = found["need"] * (1 + BESIDE) > found["granted"]
        return "refused" if is_right else "wrong", found["refused"], 0.0
    off = (found["taken"] - found["need"]) / found["peak"]
    if off > _TRUE_WITHIN or (off < -_TRUE_WITHIN and _FILE not in plan["settings"]):
        return "wrong", f"took {found['taken']:,} bytes, planned {found['need']:,}", off
    return "trained", "", off


# -- in the process of a plan ---------------------------------------------------------------------


def _carry_out(plan: dict[str, Any]) -> dict[str, Any]:
    group = Path(plan["group"])
    ctypes.CDLL(None).prctl(_WITHOUT_HUGE_PAGES, 1, 0, 0, 0)
    os.environ[SWITCH] = "off"
    _train(_model(16), plan["settings"], steps=2)  # imports, threads and tables of kernels
    model = _model(_WIDTH)
    need = _planned(model, plan["settings"])
    before, before_anonymous = _resident("VmRSS"), _resident("RssAnon")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    spare = 24 << 20  # memory of the allocator, of threads and of Python
    granted = int(plan["granted"] * need)
    used = int((group / plan["usage"]).read_text())
    (group / plan["limit"]).write_text(str(used + granted + spare))
    del os.environ[SWITCH]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    try:
        optimizer = _train(model, plan["settings"], steps=3)
    except ValueError as error:
        return {"refused": str(error), "need": need, "granted": granted + spare}
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    peak = _resident("VmHWM")
    taken = peak - before
    if _FILE in plan["settings"]:
        taken = _resident("RssAnon") - before_anonymous
    del optimizer
    return {"need": need, "taken": taken, "peak": peak}


def _model(width: int) -> nn.Module:
    layers = (nn.Linear(width, width, bias=False) for _ in range(_LAYERS))
    return nn.Sequential(*layers).bfloat16()


def _train(model: nn.Module, settings: dict[str, Any], steps: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = mp_optim.AdamW(model.parameters(), lr=1e-3, **settings)
        for _ in range(steps):
            # without products of matrices, for which torch takes memory of its own
            torch.stack([param.sum() for param in model.parameters()]).sum().backward()
            optimizer.step()
    return optimizer


def _planned(model: nn.Module, settings: dict[str, Any]) -> int:
    """Return the bytes that the plan says, beside the model."""
    tiny = mp_optim.AdamW(_model(16).parameters(), lr=1e-3, **settings)
    config = tiny.config
    groups = [{"params": list(model.parameters())}]
    plan_of, _ = rank_planner(StackRequest(config, [model], param_groups=groups))
    return in_host_memory(plan_of(config), config).host_total


def _resident(name: str) -> int:
    """Return a size of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)
