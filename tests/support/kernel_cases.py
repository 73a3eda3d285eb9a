"""Tensor lists of every form for kernels, and a step over them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, blocks_of
from mp_optim.core.slot_state import AVERAGE, REMAINDER, scale_key
from mp_optim.kernels.codecs import Noise, encode_, is_blocked, split_
from mp_optim.kernels.element_rules import ELEMENT_STEPS
from mp_optim.kernels.kernel_args import (
    MAIN,
    RULE_SCALARS,
    LambScalars,
    MuonScalars,
    TensorLists,
    fp32,
)
from mp_optim.kernels.state_format import moment_specs

ODD = [
    *(0.0, -0.0, 1e-40, -1e-40, 1e-45, 3e38, -3e38, 65504.0, 65520.0, 6e-8, 2.0**-133, 1e-33),
    *(math.inf, -math.inf, math.nan),
]
GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "bias_correction": True,
    "adam_w_mode": True,
    "grad_averaging": True,
    "use_nvlamb": False,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
}
STARTS = (256, 0, 2**32 - 512, 5 * 2**32 + 768)
KEYS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
    "plain sgd": (),
}
PASSES = {**KEYS, "muon_momentum": ("momentum_buffer",), "muon_apply": ()}
"""Rules, and kernel passes that are one part of a rule."""


LONE = "lone"
"""Marks, as a remainder dtype, bfloat16 parameters without remainders."""


@dataclass(frozen=True)
class Case:
    grad: torch.dtype = torch.bfloat16
    output: torch.dtype | None = torch.bfloat16
    rest: torch.dtype | str | None = None
    moments: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    noisy: bool = False
    odd: bool = False
    aligned: bool = False
    inside: bool = False
    average: torch.dtype | None = None


def values(generator: torch.Generator, n: int, odd: bool) -> Tensor:
    x = torch.randn(n, generator=generator) * torch.pow(
        10.0, torch.randint(-12, 6, (n,), generator=generator).float()
    )
    if odd and n:
        where = torch.randint(0, n, (min(n, 40),), generator=generator)
        x[where] = torch.tensor(ODD)[torch.randint(0, len(ODD), (len(where),), generator=generator)]
    return x


def some_mild(generator: torch.Generator, value: Tensor) -> Tensor:
    mild, blocks = values(generator, len(value), False), blocks_of(len(value))
    kinds = torch.randint(0, 3, (blocks,), generator=generator).repeat_interleave(BLOCK)
    kinds = kinds[: len(value)]
    return torch.where(kinds == 0, value, torch.where(kinds == 1, mild, mild * 1e-30))


def into_other_memory(lists: TensorLists) -> TensorLists:
    """Return the same call with the present values as its source, and new memory with all bits set
    as its destination."""

    def other(tensor: Tensor) -> Tensor:
        found = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[3:]
        found.view(torch.uint8).fill_(0xFF)
        return found

    return replace(
        lists,
        main=[other(main) for main in lists.main],
        source={MAIN: lists.main, **lists.state},
        state={key: [other(tensor) for tensor in tensors] for key, tensors in lists.state.items()},
    )


def lists_of(seed: int, sizes: Sequence[int], keys: tuple[str, ...], case: Case) -> TensorLists:
    generator = torch.Generator().manual_seed(seed)

    def put(x: Tensor, dtype: torch.dtype) -> Tensor:
        offset = 0 if case.aligned else int(torch.randint(0, 9, (), generator=generator))
        buffer = torch.zeros(len(x) + offset, dtype=dtype)[offset:]
        return buffer.copy_(x)

    def random(dtype: torch.dtype) -> list[Tensor]:
        return [put(values(generator, n, case.odd), dtype) for n in sizes]

    main, state = random(torch.float32), {}
    if case.rest == LONE:
        main = [put(value, torch.bfloat16) for value in main]
    elif isinstance(case.rest, torch.dtype):
        state[REMAINDER] = [put(torch.zeros(n), case.rest) for n in sizes]
        whole, main = main, [put(torch.zeros(n), torch.bfloat16) for n in sizes]
        for value, param, rest in zip(whole, main, state[REMAINDER], strict=True):
            split_(value, param, rest)
    kept = [pair for pair in zip(keys, case.moments, strict=False) if pair[0]]
    for key, dtype in kept:
        second, in_blocks = key == "exp_avg_sq", is_blocked(dtype)
        forms = [moment_specs(key, torch.Size([n]), dtype) for n in sizes]
        for name in forms[0] if forms else ():
            state[name] = [put(torch.zeros(form[name][0]), form[name][1]) for form in forms]
        scales = state.get(scale_key(key), [None] * len(sizes))
        for stored, scale, n in zip(state[key], scales, sizes, strict=True):
            value = values(generator, n, case.odd)
            if in_blocks and case.odd:
                value = some_mild(generator, value)
            encode_(value.abs_() if second else value, stored, scale, second)
    grads = random(case.grad)
    outputs = [None] * len(sizes) if case.output is None else random(case.output)
    if case.average is not None:
        state[AVERAGE] = random(case.average)
    return TensorLists(
        main,
        grads,
        state,
        outputs,
        [
            Noise(0x9ABCDEF1, 0xFFFFFF00 + 7919 * at & 0xFFFFFFFF, STARTS[at % 4] * case.inside)
            for at in range(len(sizes))
        ]
        if case.noisy
        else None,
        average_weight=fp32(0.01),
    )


def step_with(
    backend: Any,
    rule: str,
    lists: TensorLists,
    group: dict[str, Any],
    step: int,
    multiplier: float | Tensor,
) -> Tensor | None:
    if rule in ELEMENT_STEPS:
        backend.step(rule, lists, RULE_SCALARS[rule].at(group, step), multiplier)
    elif rule == "muon_momentum":
        momenta = TensorLists([], lists.grad, lists.state, lists.output, lists.noise)
        backend.muon_momentum(momenta, MuonScalars.at(group), multiplier)
    elif rule == "muon_apply":
        factors = [fp32(0.5 / (1 + index)) for index in range(len(lists.main))]
        backend.muon_apply(lists, MuonScalars.at(group), factors)
    else:
        scalars = LambScalars.at(group, step)
        sums: Tensor = backend.lamb_moments(lists, scalars, multiplier)
        ratios = [float(np.float32(0.1 / (1 + index))) for index in range(len(lists.main))]
        has_flag = isinstance(multiplier, Tensor) and multiplier.numel() == 2
        skip = {"skip": multiplier[1:]} if has_flag else {}
        backend.lamb_apply(lists, scalars, ratios, **skip)
        return sums
    return None
