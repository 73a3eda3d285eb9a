"""Check that the host memory of a stack is available, before any memory is allocated.

The check compares the plan of host memory with the limits of :mod:`mp_optim.host.memory_limits`.
Planning builds a stack on the meta device, so planning is skipped if an upper bound of the plan
fits.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from mp_optim.config import OptimizerConfig
from mp_optim.core import local_tensor
from mp_optim.core.names import named_params
from mp_optim.factory.build import StackRequest
from mp_optim.factory.memory_plan import Memory, MemoryPlan
from mp_optim.factory.offload_fraction import gpu_limit, in_words, rank_planner, with_fraction
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
"""Upper bound of windows, and of staging buckets, in host memory at the same time."""
BESIDE = 1 / 32
"""Share of a plan that is added for temporary tensors and allocators."""
_DISK = "free disk space of "

PlanOf = Callable[[OptimizerConfig], MemoryPlan]


def check_host_memory(request: StackRequest, *, is_class: bool = False) -> None:
    """Check that this process may allocate the host memory of a stack.

    Args:
        request: arguments of the stack; the config's offload fraction is a number.
        is_class: True if errors use arguments of the optimizer classes, not fields of the config.

    Raises:
        ValueError: the stack needs more memory than is left; the message has both numbers, and
            settings that fit.
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
        # Planning builds the stack, and the real build repeats its warnings.
        warnings.simplefilter("ignore")
        try:
            plan_of = _planner(request)
            plan = plan_of(config)
        except (TypeError, ValueError) as error:
            _log.info("host memory is not planned: building the stack fails, too (%s)", error)
            return
        # Read the limits again, because planning imported modules, which take memory.
        limits = _limits(config)
        lacking = _lacking(plan, limits)
        if lacking is not None:
            ways = itertools.islice(_fitting(request, plan_of, limits, is_class), 2)
            raise ValueError(_refusal(config, plan, lacking, list(ways), is_class))


# -- needs and limits -----------------------------------------------------------------------------


def _limits(config: OptimizerConfig) -> list[MemoryLimit]:
    """Return the limits of host memory, and of the disk if the state is stored on a disk.

    A missing folder is skipped, because creating the file in that folder raises an error.
    """
    limits, folder = memory_limits(this_host()), config.optimizer_state_path
    if folder is not None and config.may_offload and os.path.isdir(folder):
        usage = shutil.disk_usage(folder)
        limits.append(MemoryLimit(f"{_DISK}{folder}", usage.total, usage.free))
    return limits


def _planner(request: StackRequest) -> PlanOf:
    """Return a function from a config to its plan. A model on the CPU counts as host memory."""
    plan_of, _ = rank_planner(request)
    if request.device.type != "cpu":
        return plan_of
    stepped = named_params(request.modules())
    grads = [local_tensor(param.grad) for _, param in stepped if param.grad is not None]
    allocated = sum(grad.nbytes for grad in grads)
    return lambda config: in_host_memory(plan_of(config), config, allocated)


def in_host_memory(plan: MemoryPlan, config: OptimizerConfig, allocated: int = 0) -> MemoryPlan:
    """Convert a plan for an accelerator into a plan for a model on the CPU. Memory of the model
    itself is left out.

    Args:
        plan: plan for an accelerator.
        config: config of the plan. With ``sync`` in host memory, steps need no staging.
        allocated: bytes of gradients that are already allocated.
    """
    device, pinned, pageable = plan.accelerator, plan.pinned_host, plan.pageable_host
    if (config.offload_mode, config.offload_place, config.optimizer_state_path) == _IN_PLACE:
        pinned, pageable = replace(pinned, staging=0), replace(pageable, staging=0)
    moved = replace(device, model_params=0, grads=max(device.grads - allocated, 0))
    sizes = {
        spec.name: getattr(pageable, spec.name) + getattr(moved, spec.name)
        for spec in fields(Memory)
    }
    return replace(plan, accelerator=Memory(), pinned_host=pinned, pageable_host=Memory(**sizes))


_IN_PLACE = ("sync", "host", None)


def _with_temporary(size: int) -> int:
    return size + int(size * BESIDE)


def _lacking(plan: MemoryPlan, limits: Sequence[MemoryLimit]) -> tuple[MemoryLimit, int] | None:
    """Return the limit that a plan exceeds by the most bytes, and the needed bytes; None if the
    plan fits."""
    host, disk = _with_temporary(plan.host_total), plan.disk.total
    needs = [(limit, disk if limit.name.startswith(_DISK) else host) for limit in limits]
    beyond = [(limit, need) for limit, need in needs if need > limit.free]
    return max(beyond, key=lambda pair: pair[1] - pair[0].free, default=None)


# -- settings that would fit ----------------------------------------------------------------------


class _Change(NamedTuple):
    """A change of settings, under the names of the config's fields and of the classes'
    arguments."""

    fields: dict[str, Any]
    arguments: dict[str, Any]


def _form(name: str, dtype: str) -> _Change:
    """Return a change to moments in fewer bits, with 16-bit remainders as main params."""
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    in_class = {"state": name, "main_params": "remainder16"}
    return _Change({"use_precision_aware_optimizer": True, **moments}, in_class)


_SYNC = _Change(*[{"offload_mode": "sync"}] * 2)
_EIGHT_BITS = _form("8bit", "uint8")
_DISK_PATH = {"optimizer_state_path": "/a/local/disk"}
_ON_DISK = _Change(
    {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, **_DISK_PATH},
    {"offload": 1.0, **_DISK_PATH},
)


def _changes(request: StackRequest) -> Iterator[_Change]:
    """Yield changes of one setting, the cheapest first, and then changes of several settings."""
    config = request.config
    faster = [_SYNC] if config.may_offload and config.offload_mode != "sync" else []
    yield from (*faster, _form("bf16", "bfloat16"), _EIGHT_BITS)
    if config.may_offload and request.device.type != "cpu":
        half = float(config.optimizer_offload_fraction) / 2
        yield _Change({"optimizer_offload_fraction": half}, {"offload": half})
    yield _ON_DISK
    smaller = [*faster, _EIGHT_BITS]
    for several in (smaller, [_EIGHT_BITS, _ON_DISK], [*smaller, _ON_DISK]):
        merged = _Change({}, {})
        for change in several:
            merged.fields.update(change.fields)
            merged.arguments.update(change.arguments)
        yield merged


def _fitting(
    request: StackRequest, plan_of: PlanOf, limits: Sequence[MemoryLimit], is_class: bool
) -> Iterator[str]:
    """Yield texts of the changes that fit, with their bytes of host memory and disk."""
    on_device = gpu_limit(request.config, request.device)
    for change in _changes(request):
        try:
            config = replace(request.config, **change.fields)
            plan = plan_of(config if config.may_offload else with_fraction(config, 0.0))
        # The rule or the place does not support this change, so another change is tried.
        except (TypeError, ValueError):
            continue
        if on_device is not None and plan.accelerator.total > on_device:
            continue
        if config == request.config or _lacking(plan, limits) is not None:
            continue
        settings = change.arguments if is_class else change.fields
        words = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        on_disk = f" and {in_words(plan.disk.total)} of disk" if plan.disk.total else ""
        yield f"{words} ({in_words(_with_temporary(plan.host_total))}{on_disk})"


_NOTHING_FITS = (
    "no other storage format, mode or place fits: shard the state over more ranks, or train fewer "
    "parameters"
)


def _refusal(
    config: OptimizerConfig,
    plan: MemoryPlan,
    lacking: tuple[MemoryLimit, int],
    ways: Sequence[str],
    is_class: bool,
) -> str:
    limit, need = lacking
    if limit.name.startswith(_DISK):
        setting, kind = f"optimizer_state_path={config.optimizer_state_path!r}", "disk"
    else:
        name = "offload" if is_class else "optimizer_offload_fraction"
        fraction = config.optimizer_offload_fraction if config.may_offload else 0.0
        where = "" if fraction else " with a model on the CPU"
        setting, kind = f"{name}={fraction}{where}", f"host memory ({_by_purpose(plan)})"
    do = f"set {' or '.join(ways)}" if ways else _NOTHING_FITS
    return (
        f"{setting}: the optimizer needs {in_words(need)} of {kind}, and {limit.name} "
        f"({in_words(limit.total)}) leaves {in_words(max(limit.free, 0))}; {do}, or raise the "
        f"limit. {SWITCH}=off skips this check"
    )


def _by_purpose(plan: MemoryPlan) -> str:
    sizes = {name: pinned + pageable for name, _, pinned, pageable, _ in plan.rows()[:-1]}
    sizes["temporary tensors"] = int(plan.host_total * BESIDE)
    return ", ".join(f"{name} {in_words(size)}" for name, size in sizes.items() if size)
