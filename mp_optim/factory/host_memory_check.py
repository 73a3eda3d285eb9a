"""Check that the host memory of a stack is available, before any memory is allocated.

The check compares the plan of host memory with the limits of :mod:`mp_optim.host.memory_limits`.
Planning is slow, because it builds a stack on the meta device. So planning is skipped if an upper
bound of the plan fits.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from mp_optim.config import OptimizerConfig
from mp_optim.config.state_forms import CODED
from mp_optim.core import local_tensor
from mp_optim.core.names import named_params
from mp_optim.factory.build import StackRequest
from mp_optim.factory.memory_plan import Memory, MemoryPlan
from mp_optim.factory.offload_fraction import in_words, rank_planner
from mp_optim.host.host_share import this_host
from mp_optim.host.memory_limits import MemoryLimit, memory_limits

_log = logging.getLogger(__name__)

SWITCH = "MP_OPTIM_HOST_MEMORY_CHECK"
"""Environment variable that turns off the check of host memory if its value is ``off``."""
MOST_PER_ELEMENT = 64
"""Upper bound of the bytes per element in all settings: gradient 4, main param 4, three moments 12,
average 4, staging 8, back buffers 20, and about a quarter more for rounding."""
_MOST_PER_TENSOR = 64 << 10
"""Upper bound of additional bytes per tensor: alignment, file blocks and pages of small pieces."""
_MOST_WINDOWS = 11
"""Most windows, and most staging buckets, that are in host memory at one time."""
BESIDE = 1 / 32
"""Fraction of the planned bytes that the check adds to the plan, for temporary tensors and for the
overhead of allocators."""
_DISK = "free disk space of "


def check_host_memory(request: StackRequest, *, is_class: bool = False) -> None:
    """Check that this process may allocate the host memory of a stack.

    Args:
        request: arguments of the stack; the config's offload fraction is a number.
        is_class: True if errors use arguments of the optimizer classes, not fields of the config.

    Raises:
        ValueError: the stack needs more memory than is left; the message has both numbers, and
            settings that need less.
    """
    config, device = request.config, request.device
    if device.type == "meta" or not (device.type == "cpu" or config.may_offload):
        return
    if os.environ.get(SWITCH, "").lower() in ("off", "0"):
        return
    named = named_params(request.chunks)
    params = [local_tensor(param) for _, param in named if param.requires_grad]
    bound = MOST_PER_ELEMENT * sum(param.numel() for param in params)
    bound += _MOST_PER_TENSOR * len(params)
    if config.may_offload:
        bound += _MOST_WINDOWS * (config.stream_window_bytes + config.offload_bucket_bytes)
    if all(bound <= limit.free for limit in _limits(config)):
        return
    with warnings.catch_warnings():
        # Planning builds the stack on the meta device. Ignore its warnings, because the real build
        # repeats them.
        warnings.simplefilter("ignore")
        try:
            plan = _host_plan(request)
        except (TypeError, ValueError) as error:
            _log.info("host memory is not planned: building the stack fails, too (%s)", error)
            return
    host, disk = plan.host_total + int(plan.host_total * BESIDE), plan.disk.total
    # Read the limits again, because planning imported modules, which take memory.
    needs = [(disk if limit.name.startswith(_DISK) else host, limit) for limit in _limits(config)]
    need, limit = max(needs, key=lambda pair: pair[0] - pair[1].free, default=(0, None))
    if limit is not None and need > limit.free:
        raise ValueError(_refusal(config, plan, limit, need, is_class))


def _limits(config: OptimizerConfig) -> list[MemoryLimit]:
    """Return the limits of host memory, and of the disk if the state is stored on a disk.

    A missing folder is skipped, because creating the file in that folder raises an error.
    """
    limits, folder = memory_limits(this_host()), config.optimizer_state_path
    if folder is not None and config.may_offload and os.path.isdir(folder):
        usage = shutil.disk_usage(folder)
        limits.append(MemoryLimit(f"{_DISK}{folder}", usage.total, usage.free))
    return limits


def _host_plan(request: StackRequest) -> MemoryPlan:
    """Return the plan of a stack's host memory.

    For a model on the CPU, the optimizer's memory on the model's device is host memory. The plan
    leaves out the model itself and existing gradients.
    """
    config, (plan_of, _) = request.config, rank_planner(request)
    plan = plan_of(config)
    if request.device.type != "cpu":
        return plan
    stepped = named_params(request.modules())
    grads = [local_tensor(param.grad) for _, param in stepped if param.grad is not None]
    device, pinned, pageable = plan.accelerator, plan.pinned_host, plan.pageable_host
    is_sync = config.offload_mode == "sync" and config.offload_place == "host"
    if is_sync and config.optimizer_state_path is None:
        # A sync step updates the memory of a model on the CPU in place, so the stack allocates no
        # staging memory.
        pinned, pageable = replace(pinned, staging=0), replace(pageable, staging=0)
    missing = max(device.grads - sum(grad.nbytes for grad in grads), 0)
    moved = replace(device, model_params=0, grads=missing)
    sizes = {
        spec.name: getattr(pageable, spec.name) + getattr(moved, spec.name)
        for spec in fields(Memory)
    }
    return replace(plan, accelerator=Memory(), pinned_host=pinned, pageable_host=Memory(**sizes))


def _refusal(
    config: OptimizerConfig, plan: MemoryPlan, limit: MemoryLimit, need: int, is_class: bool
) -> str:
    is_disk = limit.name.startswith(_DISK)
    if is_disk:
        setting, kind = f"optimizer_state_path={config.optimizer_state_path!r}", "disk"
    else:
        name = "offload" if is_class else "optimizer_offload_fraction"
        fraction = config.optimizer_offload_fraction if config.may_offload else 0.0
        where = "" if fraction else " with a model on the CPU"
        sizes = {name: pinned + pageable for name, _, pinned, pageable, _ in plan.rows()[:-1]}
        sizes["temporary tensors"] = int(plan.host_total * BESIDE)
        purposes = (f"{name} {in_words(size)}" for name, size in sizes.items() if size)
        setting, kind = f"{name}={fraction}{where}", f"host memory ({', '.join(purposes)})"
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if config.may_offload and config.offload_mode != "sync" and not is_disk:
        changes.append(({"offload_mode": "sync"}, {"offload_mode": "sync"}))
    if config.exp_avg_dtype not in CODED:
        moments = {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}
        arguments = {"state": "8bit", "main_params": "remainder16"}
        changes.append(({"use_precision_aware_optimizer": True, **moments}, arguments))
    if config.optimizer_state_path is None:
        path, offload, everything = {"optimizer_state_path": "/a/local/disk"}, {}, {}
        if not config.may_offload:
            offload = {"offload": 1.0}
            everything = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        changes.append(({**everything, **path}, {**offload, **path}))
    ways = []
    for settings, arguments in changes:
        # Leave out changes that the config refuses as a contradiction, such as "sync" with
        # release_gradients=True.
        with suppress(ValueError):
            replace(config, **settings)
            said = arguments if is_class else settings
            ways.append(" and ".join(f"{name}={value!r}" for name, value in said.items()))
    advice = f"set {', or '.join(ways)}; or " if ways else ""
    return (
        f"{setting}: the optimizer needs {in_words(need)} of {kind}, and {limit.name} "
        f"({in_words(limit.total)}) leaves {in_words(max(limit.free, 0))}; {advice}shard the state "
        f"over more ranks, train fewer parameters, or raise the limit. {SWITCH}=off skips this "
        "check"
    )
