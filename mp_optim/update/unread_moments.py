"""Moments that a rule does without under some settings: Adam's first one where ``betas[0]`` is 0,
as it is the gradient then. None is kept, but one that is there from before is stepped on."""

from __future__ import annotations

import torch

from mp_optim.slots.slot_state import State
from mp_optim.slots.state_keys import scale_key


def without_unread(
    label: str,
    moment: str,
    decided: str,
    live: State,
    shape: torch.Size,
    saved: State,
    convert: bool,
) -> State:
    """A saved state with a moment that nothing reads here as it is here: dropped where none is
    kept, zeros where one is.

    Args:
        label: names the slot in messages.
        decided: the setting that makes it needless, for messages.
        shape: the moment's.
        convert: drop it.

    Raises:
        ValueError: it would be dropped, and ``convert`` is false.
    """
    if moment in saved and moment not in live:
        if not convert:
            raise ValueError(
                f"{label}: saved with {moment}, which is not kept here ({decided}); load with "
                "convert=True, which drops it, or build the optimizer with settings that keep it"
            )
        dropped = (moment, scale_key(moment))
        return {key: value for key, value in saved.items() if key not in dropped}
    if saved and moment in live and moment not in saved:
        device = live[moment].device
        zeros = torch.zeros(shape, dtype=torch.float32, device=device)
        return {**saved, moment: zeros}
    return saved


def stepped_without(label: str, moment: str, decided: str) -> ValueError:
    """What to say of a stepped slot that lacks a moment: it would have to hold gradients that are
    gone."""
    return ValueError(
        f"{label} was stepped without {moment}, which {decided} needs; set back what made it "
        "needless, or give the group the new value from its first step on; nothing was stepped"
    )
