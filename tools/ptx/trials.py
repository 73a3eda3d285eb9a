"""Launches of every form of our kernels on the emulator, compared with ``reference`` on the same
tensors. The tensors have odd sizes and addresses, and zeros, denormals, infinities and NaNs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK
from mp_optim.kernels.kernel_args import TensorLists
from mp_optim.kernels.reference import ReferenceBackend
from ptx.forms import Form
from ptx.kernels import MachineBackend
from support.kernel_cases import GROUP, LONE, ODD, PASSES, Case, lists_of, step_with

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_PARTS = {"lamb_moments": "lamb", "lamb_apply": "lamb"}
"""The rule that launches each kernel that is only a pass of a rule."""
_SMALL = (0, 1, 255, 256, 257, 1296, 2047, 2049, 8176, 8191, 8193, 16385)
"""Tails of a few elements and of almost whole tiles and chunks, at multiples of 16 and not."""
_TAIL = 1024
"""Most elements after the last whole tile."""
LAUNCHES = 4
"""Least launches of a kernel in a trial: two steps with plain values, and two with odd values."""
_MULTIPLIERS = (0.37, 0.87)
"""Multipliers of the first step and of later steps. The second keeps large gradients large."""


@dataclass(frozen=True)
class Trial:
    """Steps of a rule on tensors of a kind.

    Attributes:
        rule: a rule, or a pass of a rule.
        control: place of the multiplier: "host", "device", or "flag" (on the device, with a flag).
        settings: settings of the param group.
        step: number of the first step.
    """

    rule: str
    case: Case
    control: str
    settings: tuple[tuple[str, Any], ...]
    step: int

    def __str__(self) -> str:
        case = self.case
        parts = [case.grad, case.output, case.rest, *case.moments, case.average]
        names = [str(part).removeprefix("torch.") if part else "-" for part in parts]
        said = [" ".join(names), *(["noisy"] if case.noisy else [])]
        said += ["aligned" if case.aligned else "anywhere", self.control]
        said += ["first step"] if self.step == 1 else []
        said += [f"{name}={value}" for name, value in self.settings]
        return f"{self.rule}: {', '.join(said)}"


def trials_of(forms: Iterable[Form]) -> list[Trial]:
    found = {}
    for form in forms:
        if form.kernel in ("chunk_sums", "run_sums"):
            continue  # Every trial launches these kernels, too.
        trial = _trial_of(form)
        for aligned in (True, False):
            found[replace(trial, case=replace(trial.case, aligned=aligned))] = None
    return list(found)


def _trial_of(form: Form) -> Trial:
    values = {**form.values}
    first, second = (_DTYPES.get(values[name]) for name in ("moment1", "moment2"))
    rule = _PARTS.get(form.kernel, form.kernel)
    is_plain = first is None and f"plain {rule}" in PASSES
    plain = torch.float32
    if rule in ("lion", "sgd", "muon_momentum"):
        second = None
    case = Case(
        grad=_DTYPES[values["grad"]],
        output=_DTYPES.get(values["output"]),
        rest=_DTYPES.get(values["remainder"]) or (LONE if values["main"] == "bf16" else None),
        moments=(first or plain, second or plain),
        noisy="streams" not in form.absent,
        inside=True,
        average=_DTYPES.get(values["average"]),
    )
    if rule == "muon_momentum" and case.output is None:
        case = replace(case, output=torch.bfloat16)
    settings = _settings(values, rule, is_plain)
    control = "host"
    if values["ON_DEVICE"] == "True" or "skip" not in form.absent:
        control = "device" if "skip" in form.absent else "flag"
    if rule == "muon_apply" or form.kernel == "lamb_apply":
        control = "host"
    step = 1 if values["first"] == "True" else 2
    return Trial(f"plain {rule}" if is_plain else rule, case, control, settings, step)


def _settings(values: dict[str, str], rule: str, is_plain: bool) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {}
    if values["has_l2"] == "True":
        found["adam_w_mode"] = False
    elif values["has_decay"] == "False":
        found["weight_decay"] = 0.0
    found |= {name: True for name in ("cautious_wd", "follows") if values.get(name) == "True"}
    if values["nesterov"] == "True":
        found["nesterov"] = True
    if rule == "muon_momentum":
        found["momentum"] = 0.3 if values["average_from_end"] == "True" else 0.95
    if is_plain:
        found["momentum"] = 0.0
    return tuple(sorted(found.items()))


def sizes_of(elements: int) -> list[int]:
    rest = elements - sum(_SMALL)
    if rest <= 0:
        return [0, 1, 257, 8176, 2047, 8192 + max(2047, elements - 18500)]
    return [*_SMALL, rest // 3 | 1, rest - rest // 3 | 1]


def tensors_of(lists: TensorLists) -> dict[str, list[Tensor]]:
    outputs = [each for each in lists.output if each is not None]
    return {"main": lists.main, "output": outputs, "grad": lists.grad, **lists.state}


def made_odd(lists: TensorLists, seed: int) -> TensorLists:
    generator = torch.Generator().manual_seed(seed)
    odd = torch.tensor(sorted(ODD, key=math.isfinite, reverse=True))
    finite = sum(map(math.isfinite, ODD))
    for name, tensors in tensors_of(lists).items():
        for tensor in tensors:
            if not tensor.is_floating_point() or name.endswith("scale"):
                continue
            size = tensor.numel()
            block = torch.arange(size) // BLOCK % 8
            share = torch.where(torch.arange(size) < size - _TAIL, 0.005, 0.05)
            chosen = (torch.rand(size, generator=generator) < share) | (block == 3) | (block == 6)
            which = torch.randint(0, len(odd), (size,), generator=generator)
            which = torch.where(block == 3, which % finite, which)
            tensor[chosen] = odd[which[chosen]].to(tensor.dtype)
    return lists


class Found:
    def __init__(self, backend: Any, trial: Trial, sizes: Sequence[int]) -> None:
        self.tensors: dict[str, list[Tensor]] = {}
        for odd in (False, True):
            lists = lists_for(trial, sizes)
            if odd:
                lists = made_odd(lists, 11)
            sums = stepped(backend, trial, lists)
            for name, tensors in {**tensors_of(lists), "sums": sums}.items():
                self.tensors[f"odd {name}" if odd else name] = tensors


def stepped(backend: Any, trial: Trial, lists: TensorLists) -> list[Tensor]:
    """Take the steps of a trial, and return the sums that it computes."""
    group = {**GROUP, **dict(trial.settings)}
    is_reference = type(backend) is ReferenceBackend
    sums = []
    for step, flag in ((trial.step, 0.0), (3, 0.0), (4, 1.0)):
        multiplier = _MULTIPLIERS[step > trial.step]
        given: Any = multiplier
        if flag and (trial.control != "flag" or is_reference):
            continue  # Such a step writes nothing.
        if trial.control != "host" and not is_reference:
            pair = torch.tensor([multiplier, flag])
            given = pair if trial.control == "flag" else pair[:1]
        made = step_with(backend, trial.rule.split()[-1], lists, group, step, given)
        if made is not None and not flag:
            sums.append(made)
    return [*sums, backend.sum_of_squares(lists.grad)]


def lists_for(trial: Trial, sizes: Sequence[int]) -> TensorLists:
    lists = lists_of(7, sizes, PASSES[trial.rule], trial.case)
    for grad in lists.grad:
        grad.nan_to_num_()
    return replace(lists, follows="follows" in dict(trial.settings))


def launches_of(backend: MachineBackend, trial: Trial) -> None:
    stepped(backend, trial, lists_for(trial, [300, 1, 5000]))


def differences(ours: Found, theirs: Found) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, mine in ours.tensors.items():
        for one, other in zip(mine, theirs.tensors[name], strict=True):
            if count := _apart(one, other):
                found[name] = found.get(name, 0) + count
    return found


def _apart(one: Tensor, other: Tensor) -> int:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    same = one.contiguous().view(bits) == other.contiguous().view(bits)
    if one.is_floating_point():
        same |= one.isnan() & other.isnan()
    return int((~same).sum())
