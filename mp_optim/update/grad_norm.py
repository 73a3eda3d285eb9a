"""The norm of all gradients of a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from mp_optim.slots import SlotUpdate
from mp_optim.update.backends import choose_backend
from mp_optim.update.shard_sums import Groups, reduce_over


def global_grad_norm(updates: Sequence[SlotUpdate]) -> float:
    """L2 norm over gradients that may lie on several devices and be split over ranks, in FP64.
    Collective if some are."""
    alike: dict[tuple[torch.device, Groups], list[Tensor]] = defaultdict(list)
    for update in updates:
        alike[update.grad.device, update.shard_groups].append(update.grad)
    total = 0.0
    for (device, groups), grads in alike.items():
        part = choose_backend("auto", device)[0].sum_of_squares(grads).sum()
        reduce_over(groups, part, "agreeing on the gradient norm")
        total += float(part)
    return math.sqrt(total)
