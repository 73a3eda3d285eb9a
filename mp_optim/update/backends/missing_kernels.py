"""Says that the host steps slowly, where an installation has no native kernels."""

from __future__ import annotations

import os
from functools import cache

import torch

from mp_optim.config.capabilities import CAPABILITIES
from mp_optim.process.caller_warnings import warn
from mp_optim.slots import ParamGroups, iter_slots
from mp_optim.update.backends.native_library import ENVIRONMENT
from mp_optim.update.backends.selection import choose_backend, proof_of

_HOST = torch.device("cpu")


def warn_of_missing_kernels(fused_backend: str, rule: str, groups: ParamGroups) -> None:
    """Warn, once in a process, if a rule that has native kernels steps groups on the host without
    them, and neither ``fused_backend`` nor the environment asks for that."""
    if not any(param.is_cpu for _, param in iter_slots(groups)):
        return
    chosen = choose_backend(fused_backend, _HOST)[0].name
    is_asked_for = chosen == fused_backend or os.environ.get(ENVIRONMENT) == "off"
    has_kernels = rule in CAPABILITIES["native"].rules
    if chosen != "native" and has_kernels and not is_asked_for:
        _warn_once(proof_of("native", _HOST).reason)


@cache
def _warn_once(reason: str) -> None:
    warn(
        f"there are no native kernels ({reason}): steps on the host take five to six times as "
        "long, with the same bits. Install a wheel of mp_optim, or install it again where there "
        f"is a C++ compiler (g++ or clang++); {ENVIRONMENT}=off accepts it without this warning"
    )
