"""What each ``fused_backend`` has kernels for, as data: checked at construction, shown by
``mp-optim doctor``.

Backends that are not listed carry out every rule with every form of state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mp_optim.config.rules import FIRST_DTYPE, KERNEL_RULES, RULES, SECOND_DTYPE

BACKENDS = (
    "auto",
    "native",
    "reference",
    "torch",
    "triton",
    "apex",
    "transformer_engine",
)


@dataclass(frozen=True)
class Capability:
    """What the kernels of one backend can do.

    Attributes:
        rules: rules there are kernels for.
        others_by_reference: other rules are carried out by ``reference``, and it is shown; else
            they are refused.
        compact: every form of compact state, with stochastic rounding.
        bfloat16_moments: rules that may keep all their moments in bfloat16.
        remainders: rules that may keep 16-bit remainders.
    """

    rules: tuple[str, ...] = KERNEL_RULES
    others_by_reference: bool = False
    compact: bool = True
    bfloat16_moments: tuple[str, ...] = ()
    remainders: tuple[str, ...] = ()


CAPABILITIES = {
    "auto": Capability(others_by_reference=True),
    "native": Capability(rules=(*KERNEL_RULES, "adafactor")),
    "reference": Capability(others_by_reference=True),
    "torch": Capability(rules=("adam", "sgd"), others_by_reference=True, compact=False),
    "apex": Capability(rules=("adam", "lamb", "sgd"), compact=False),
    "transformer_engine": Capability(
        rules=("adam", "sgd"),
        compact=False,
        bfloat16_moments=("adam",),
        remainders=("adam",),
    ),
}


def refusal(
    backend: str,
    rule: str,
    moments: Sequence[torch.dtype],
    remainder_bits: int | None,
    stochastic: bool,
) -> tuple[str, str] | None:
    """The field of the config that the backend cannot honour, and what to do instead; None if there
    is none.

    Args:
        moments: ``exp_avg_dtype`` and ``exp_avg_sq_dtype``. remainder_bits: None without
            remainders.
    """
    if not any(moment.dtype_field for moment in RULES[rule].moments):
        for name, dtype in zip((FIRST_DTYPE, SECOND_DTYPE), moments, strict=True):
            if dtype != torch.float32:
                return (
                    name,
                    f"{rule} keeps its state in torch.float32; leave it at that",
                )
    can = CAPABILITIES.get(backend, Capability())
    if rule not in can.rules and not can.others_by_reference:
        return "fused_backend", (
            f"has no kernels for optimizer={rule!r}; choose fused_backend='auto', or an optimizer "
            f"of {list(can.rules)}"
        )
    if can.compact:
        return None
    return (
        _moment_refusal(can, backend, rule, moments)
        or _remainder_refusal(can, backend, rule, remainder_bits)
        or (
            (
                "stochastic_rounding",
                f"fused_backend={backend!r} rounds to nearest; choose another backend",
            )
            if stochastic
            else None
        )
    )


def _moment_refusal(
    can: Capability, backend: str, rule: str, moments: Sequence[torch.dtype]
) -> tuple[str, str] | None:
    dtypes = dict(zip((FIRST_DTYPE, SECOND_DTYPE), moments, strict=True))
    used = {moment.dtype_field for moment in RULES[rule].moments}
    kept = {name: dtype for name, dtype in dtypes.items() if name in used}
    fits_bfloat16 = rule in can.bfloat16_moments
    if set(kept.values()) <= {torch.float32} or (
        fits_bfloat16 and set(kept.values()) == {torch.bfloat16}
    ):
        return None
    field = next(name for name, dtype in kept.items() if dtype != torch.float32)
    both = ", or both of them in torch.bfloat16" if fits_bfloat16 else ""
    return (
        field,
        f"fused_backend={backend!r} keeps moments in torch.float32{both}; choose another backend",
    )


def _remainder_refusal(
    can: Capability, backend: str, rule: str, bits: int | None
) -> tuple[str, str] | None:
    if bits is None:
        return None
    if rule not in can.remainders:
        return "store_param_remainders", (
            f"fused_backend={backend!r} keeps main params in float32; set "
            "store_param_remainders=False, or choose another backend"
        )
    if bits != 16:
        return (
            "param_remainder_bits",
            f"fused_backend={backend!r} keeps remainders of 16 bits; choose another backend",
        )
    return None
