"""Attributes that Megatron's modules have, which say where in the whole model they are. They are
read here and nowhere else."""

from __future__ import annotations

from torch import nn


def layer_number(module: nn.Module) -> int | None:
    """``layer_number``: which layer of the whole model this is, from 1; None if nothing is said."""
    number = getattr(module, "layer_number", None)
    return number if type(number) is int and number > 0 else None


def has_gated_first_layer(module: nn.Module) -> bool:
    """Whether ``linear_fc1`` of an MLP holds gate and up behind each other
    (``config.gated_linear_unit``)."""
    config = getattr(module, "config", None)
    gated = bool(getattr(config, "gated_linear_unit", False))
    return gated and "linear_fc1" in module._modules
