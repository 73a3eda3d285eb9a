"""Refuse a stack whose host memory is not granted, before any of it is allocated.

The plan of host memory is compared with the limits of :mod:`mp_optim.host.memory_limits`. A plan
costs a stack on the meta device, so it is made only where an upper bound of it does not fit.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mp_optim.config import OptimizerConfig
from mp_optim.core import local_tensor
from mp_optim.core.names import named_params
from mp_optim.factory.build import StackRequest
from mp_optim.factory.memory_plan import Memory, MemoryPlan
from mp_optim.factory.offload_fraction import SHARE, in_words, rank_planner, with_fraction
from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.host_share import this_host
from mp_optim.host.memory_limits import MemoryLimit, memory_limits

_log = logging.getLogger(__name__)

SWITCH = "MP_OPTIM_HOST_MEMORY_CHECK"
"""Environment variable: ``off`` skips the check."""
MOST_PER_ELEMENT = 64
"""Bytes that no form, mode or place takes more of for an element: gradient 4, main param 4, three
moments 12, average 4, staging 8, back buffers 20, and a third as much for rounding."""
_MOST_PER_TENSOR = 64 << 10
"""Bytes beside these, for alignment, blocks of a file and pages of small pieces."""
_MOST_WINDOWS = 11
"""Windows in host memory at a time, at most; staging has fewer buckets of fixed size."""


def check_host_memory(request: StackRequest, *, is_class: bool = False) -> None:
    """Raise unless the host memory that the stack will take is granted to this process.

    Args:
        request: the stack; its config's offload fraction is a number.
        is_class: errors use arguments of the torch-shaped classes, not fields of the config.

    Raises:
        ValueError: it is not, with both numbers and the settings that would fit.
    """
    config, device = request.config, request.device
    is_on_host = device.type == "cpu"
    if device.type == "meta" or not (is_on_host or config.may_offload):
        return
    if os.environ.get(SWITCH, "").lower() in ("off", "0"):
        return
    limits = [*memory_limits(this_host()), *_disk(config)]
    named = named_params(request.chunks)
    params = [local_tensor(param) for _, param in named if param.requires_grad]
    bound = MOST_PER_ELEMENT * sum(param.numel() for param in params)
    bound += _MOST_PER_TENSOR * len(params)
    if config.may_offload:
        bound += _MOST_WINDOWS * (config.stream_window_bytes + config.offload_bucket_bytes)
    if all(bound <= limit.free for limit in limits):
        return
    stepped = named_params(request.modules())
    grads = [param.grad for _, param in stepped if param.grad is not None]
    allocated = sum(local_tensor(grad).nbytes for grad in grads) if is_on_host else 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the stack itself warns
            plan_of, _ = rank_planner(request)
            if is_on_host:
                plan_of = in_host_memory(plan_of)
            planned = plan_of(config)
    except (TypeError, ValueError) as error:
        _log.info("host memory is not planned: building the stack fails likewise (%s)", error)
        return
    # Planning imported modules, which took memory themselves.
    limits = [*memory_limits(this_host()), *_disk(config)]
    lacking = _lacking(planned, limits, is_on_host, allocated)
    if lacking is None:
        return
    accelerator = accelerator_of(device)
    on_device = config.gpu_memory
    if on_device is None and accelerator is not None:
        on_device = int(SHARE * accelerator.memory_bytes(device))
    search = _Search(config, plan_of, limits, is_on_host, allocated, on_device)
    raise ValueError(_refusal(search, planned, lacking, is_class))


# -- what is needed, and what is granted ----------------------------------------------------------

_DISK = "free disk space of "


def _disk(config: OptimizerConfig) -> Iterator[MemoryLimit]:
    """Yield the disk space for state, if some is kept there.

    A folder that does not exist has its own error, when the file is made.
    """
    folder = config.optimizer_state_path
    if folder is not None and config.may_offload and os.path.isdir(folder):
        usage = shutil.disk_usage(folder)
        yield MemoryLimit(f"{_DISK}{folder}", usage.total, usage.free)


def _needed(plan: MemoryPlan, limit: MemoryLimit, is_on_host: bool, allocated: int) -> int:
    """Return the bytes that a plan takes of what a limit limits."""
    if limit.name.startswith(_DISK):
        return plan.disk.total
    planned = needed_bytes(plan, is_on_host, allocated)
    return planned + int(planned * BESIDE)


BESIDE = 1 / 32
"""Share of a plan that a process may take beside it, for temporary tensors and allocators."""


def needed_bytes(plan: MemoryPlan, is_on_host: bool, allocated: int = 0) -> int:
    """Return the bytes of host memory that a plan takes beside the model.

    Args:
        is_on_host: the model is in host memory, with everything that is planned beside it.
        allocated: bytes of gradients that are there already.
    """
    beside = plan.accelerator.total - plan.accelerator.model_params
    return plan.host_total + (beside - min(allocated, beside) if is_on_host else 0)


def in_host_memory(
    plan_of: Callable[[OptimizerConfig], MemoryPlan],
) -> Callable[[OptimizerConfig], MemoryPlan]:
    """Return plans of a model in host memory, which ``sync`` steps in place, without staging."""

    def planned(config: OptimizerConfig) -> MemoryPlan:
        plan = plan_of(config)
        settings = config.offload_mode, config.offload_place, config.optimizer_state_path
        if settings != ("sync", "host", None):
            return plan
        pinned, pageable = plan.pinned_host, plan.pageable_host
        return replace(
            plan, pinned_host=replace(pinned, staging=0), pageable_host=replace(pageable, staging=0)
        )

    return planned


def _lacking(
    plan: MemoryPlan, limits: Sequence[MemoryLimit], is_on_host: bool, allocated: int
) -> tuple[MemoryLimit, int] | None:
    """Return the limit that a plan exceeds by most, and the bytes it needs; None if it fits."""
    needs = [(limit, _needed(plan, limit, is_on_host, allocated)) for limit in limits]
    beyond = [(limit, need) for limit, need in needs if need > limit.free]
    return max(beyond, key=lambda pair: pair[1] - pair[0].free, default=None)


# -- settings that would fit ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """A change of settings: as fields of the config, and as arguments of the classes."""

    fields: Mapping[str, Any]
    arguments: Mapping[str, Any]

    def __or__(self, other: _Change) -> _Change:
        return _Change({**self.fields, **other.fields}, {**self.arguments, **other.arguments})


def _same_words(**settings: Any) -> _Change:
    return _Change(settings, settings)


def _form(name: str, dtype: str) -> _Change:
    """Moments in fewer bits, and main params as the 16 bits that bfloat16 drops."""
    in_config = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    return _Change(
        {"use_precision_aware_optimizer": True, **in_config},
        {"state": name, "main_params": "remainder16"},
    )


_EIGHT_BITS, _SIXTEEN_BITS = _form("8bit", "uint8"), _form("bf16", "bfloat16")
_SYNC = _same_words(offload_mode="sync")
_FOLDER = "/a/local/disk"
_ON_DISK = _same_words(optimizer_state_path=_FOLDER)
_WHOLE = _Change({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}, {"offload": 1})
_FRACTIONS = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)


@dataclass(frozen=True)
class _Search:
    """The config that does not fit, and how others are planned.

    Attributes:
        on_device: bytes that parameters, gradients and optimizer may take of the accelerator.
    """

    config: OptimizerConfig
    plan_of: Callable[[OptimizerConfig], MemoryPlan]
    limits: Sequence[MemoryLimit]
    is_on_host: bool
    allocated: int
    on_device: int | None

    def need(self, change: _Change) -> tuple[int, int, bool] | None:
        """Return bytes of host memory and disk with a change, and whether they are granted; None if
        the change is not possible or changes nothing."""
        if all(getattr(self.config, name) == value for name, value in change.fields.items()):
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = replace(self.config, **change.fields)
                if not config.may_offload:
                    config = with_fraction(config, 0.0)
                plan = self.plan_of(config)
        except (TypeError, ValueError):  # the rule has no such form, or the place no such mode
            return None
        fits = _lacking(plan, self.limits, self.is_on_host, self.allocated) is None
        if not self.is_on_host and self.on_device is not None:
            fits = fits and plan.accelerator.total <= self.on_device
        host = _needed(plan, MemoryLimit("", 0, 0), self.is_on_host, self.allocated)
        return host, plan.disk.total, fits

    def singles(self) -> Iterator[_Change]:
        """Yield changes of one setting, the ones that cost least first."""
        if self.config.may_offload and self.config.offload_mode != "sync":
            yield _SYNC
        yield _SIXTEEN_BITS
        yield _EIGHT_BITS
        if self.config.may_offload and not self.is_on_host:
            for share in _FRACTIONS:
                if share < float(self.config.optimizer_offload_fraction):
                    yield _Change({"optimizer_offload_fraction": share}, {"offload": share})
        if self.config.optimizer_state_path is None:
            yield _ON_DISK if self.config.may_offload else _WHOLE | _ON_DISK

    def fitting(self) -> list[tuple[_Change, int, int]]:
        """Return changes that fit, at most three of different kinds, with the bytes they need of
        host memory and disk; of one setting if there are some, else of several."""
        singles = list(self.singles())
        base = [change for change in singles if change in (_SYNC, _EIGHT_BITS)]
        several = [left | right for left in base for right in singles if left is not right]
        if base and singles[-1] not in base:
            several.append(_merged([*base, singles[-1]]))
        for changes in (singles, several):
            found: dict[frozenset[str], tuple[_Change, int, int]] = {}
            for change in changes:
                kind = frozenset(change.fields)
                if kind not in found and (need := self.need(change)) and need[2]:
                    found[kind] = change, need[0], need[1]
                if len(found) == 3:
                    break
            if found:
                return list(found.values())
        return []


def _merged(changes: Sequence[_Change]) -> _Change:
    merged = changes[0]
    for change in changes[1:]:
        merged |= change
    return merged


# -- the message ----------------------------------------------------------------------------------


def _refusal(
    search: _Search, plan: MemoryPlan, lacking: tuple[MemoryLimit, int], is_class: bool
) -> str:
    limit, need = lacking
    fraction = search.config.optimizer_offload_fraction if search.config.may_offload else 0.0
    name = "offload" if is_class else "optimizer_offload_fraction"
    what, unit = f"{name}={fraction}", "host memory"
    if limit.name.startswith(_DISK):
        what, unit = f"optimizer_state_path={search.config.optimizer_state_path!r}", "disk"
    elif fraction == 0.0:
        what += " with a model on the CPU"
    parts = _by_purpose(plan, search) if unit == "host memory" else ""
    ways = [_way(*each, is_class) for each in search.fitting()]
    do = f"set {' or '.join(ways)}" if ways else _NOTHING_FITS
    return (
        f"{what}: the optimizer needs {in_words(need)} of {unit}{parts}, and {limit.name} "
        f"({in_words(limit.total)}) leaves {in_words(max(limit.free, 0))}; {do}, or raise the "
        f"limit. {SWITCH}=off skips this check"
    )


_NOTHING_FITS = (
    "no other form of state, mode or place fits: shard the state over more ranks, or train fewer "
    "parameters"
)


def _by_purpose(plan: MemoryPlan, search: _Search) -> str:
    places = [plan.pinned_host, plan.pageable_host]
    if search.is_on_host:
        missing = max(plan.accelerator.grads - search.allocated, 0)
        places.append(replace(plan.accelerator, model_params=0, grads=missing))
    sizes = {
        spec.name.replace("_", " "): sum(getattr(place, spec.name) for place in places)
        for spec in fields(Memory)
    }
    sizes["temporary tensors"] = int(sum(sizes.values()) * BESIDE)
    shown = [f"{name} {in_words(size)}" for name, size in sizes.items() if size]
    return f" ({', '.join(shown)})" if shown else ""


def _way(change: _Change, host: int, disk: int, is_class: bool) -> str:
    settings = change.arguments if is_class else change.fields
    words = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    on_disk = f" and {in_words(disk)} of disk" if disk else ""
    return f"{words} ({in_words(host)}{on_disk})"
