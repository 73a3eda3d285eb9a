"""Attributes of parameters that several modules read: those of Megatron and Transformer Engine, and
attributes that layers of this package set for each other."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mp_optim.core.identity import Slot

_NORM_ATTRIBUTES = (
    "shared",
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "grad_norm_group",
)

# -- gradients and main params, as attributes of Megatron and Transformer Engine ------------------


ShownMains = dict[Slot, tuple[Any, Tensor]]
"""For each slot whose parameter has a ``main_param`` attribute, the parameter and its main param.
Weak references are not possible: ``torch.utils.swap_tensors`` refuses their targets."""


def shown_mains_of(owner: object) -> ShownMains:
    """Return an empty record for :func:`set_main_param`. When the owner is freed, the recorded
    attributes are deleted from the model's parameters.

    Args:
        owner: the optimizer.
    """
    shown: ShownMains = {}
    weakref.finalize(owner, _hide_main_params, shown).atexit = False
    return shown


def set_main_param(
    shown: ShownMains, slot: Slot, param: Any, main: Tensor, sharded: bool | None = None
) -> None:
    """Set ``param.main_param``, as Megatron does.

    Args:
        shown: the optimizer's record; the entry of the slot is set.
        slot: the parameter's slot.
        param: the model's parameter.
        main: the main param.
        sharded: value of ``main_param_sharded``: True if the main param has only this rank's
            elements. None sets no attribute.
    """
    if slot in shown and shown[slot][0] is not param:
        _hide_main_params({slot: shown[slot]})
    shown[slot] = param, main
    param.main_param = main
    if sharded is not None:
        param.main_param_sharded = sharded


def _hide_main_params(shown: ShownMains) -> None:
    for param, main in shown.values():
        if main_param_of(param) is not main:
            continue  # Keep the attribute, because another optimizer has set it since then.
        del param.main_param
        if hasattr(param, "main_param_sharded"):
            del param.main_param_sharded
    shown.clear()


def main_param_of(param: Tensor) -> Tensor | None:
    """Return ``param.main_param``, which :func:`set_main_param` sets, or None."""
    main: Tensor | None = getattr(param, "main_param", None)
    return main


# -- attributes that Megatron sets ----------------------------------------------------------------


def is_tensor_parallel(param: Tensor) -> bool:
    """True if the ranks of a tensor-parallel group have different parts
    (``tensor_model_parallel``)."""
    return bool(getattr(param, "tensor_model_parallel", False))


def partition_dim(param: Tensor) -> int | None:
    """Return the dimension that tensor parallelism splits (``partition_dim``), or None."""
    dim: int | None = getattr(param, "partition_dim", None)
    return None if dim is None or dim < 0 else dim


def partition_form(param: Tensor) -> tuple[int, tuple[int, ...] | None]:
    """Return how the split dimension is divided into blocks, each of which is split over the ranks:
    the number of equal blocks (``partition_stride``), and this rank's length of each block if the
    blocks differ in size (``partition_sizes``), else None."""
    sizes = getattr(param, "partition_sizes", None)
    stride = int(getattr(param, "partition_stride", 1))
    return stride, None if sizes is None else tuple(map(int, sizes))


def partition_blocks(param: Tensor) -> tuple[int, ...]:
    """Return this rank's length of each block along ``partition_dim``, in order; empty without a
    valid ``partition_dim``.

    If the attributes do not fit the length of the dimension, the dimension counts as one block.
    """
    dim = partition_dim(param)
    if dim is None or dim >= param.dim():
        return ()
    stride, sizes = partition_form(param)
    length = param.shape[dim]
    if sizes is not None:
        return sizes if sum(sizes) == length else (length,)
    return (length // stride,) * stride if stride and not length % stride else (length,)


def is_expert_param(param: Tensor, name: str) -> bool:
    """True if the parameter is an expert's: Megatron sets ``allreduce=False``, and Hugging Face has
    ``.experts.`` in the name. Shared experts count as dense."""
    if not getattr(param, "allreduce", True):
        return True
    return ".experts." in f".{name}" and "shared_experts" not in name


REFUSED = {
    "is_gtp_weight_remat": (
        "generalised tensor parallelism is not supported, and norms and matrices would be wrong; "
        "leave out --tensor-parallel-num-weight-shards and its expert counterpart"
    ),
    "__fsdp_param__": (
        "Megatron-FSDP is not supported; use torch's FSDP2 (--use-torch-fsdp2), whose "
        "DTensors are stepped shard by shard"
    ),
}
"""Attributes of parameters that belong to unsupported features, with the reason and the cure."""


def check_attributes(name: str, param: Tensor) -> None:
    """Raise ValueError, with the parameter's name, if an attribute in :data:`REFUSED` is true."""
    for attribute, reason in REFUSED.items():
        if value := getattr(param, attribute, False):
            raise ValueError(f"{attribute}={value!r} on {name}: {reason}")


def norm_attributes(param: Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that decide about norms and tensor-parallel splits, by
    name. Attributes that are not set are left out."""
    return {name: getattr(param, name) for name in _NORM_ATTRIBUTES if hasattr(param, name)}


# -- attributes that layers of this package set for each other ------------------------------------


@dataclass(frozen=True)
class FlatRanges:
    """The ranges of one flattened parameter that the ranks of a flat buffer have.

    Attributes:
        bounds: first element of each rank's shard of the buffer, then the end of the last shard.
        first: position of the parameter in the buffer, in elements.
        numel: number of elements of the parameter.
    """

    bounds: tuple[int, ...]
    first: int
    numel: int

    def ranges(self) -> list[tuple[int, int]]:
        """Return [start, stop) of each rank's range, in elements of the parameter."""
        places = [min(max(b - self.first, 0), self.numel) for b in self.bounds]
        return list(itertools.pairwise(places))


@dataclass(frozen=True)
class ShardInfo:
    """The position of a tensor in the parameter that the tensor is a part of.

    Attributes:
        first_element: index of the tensor's first element in the flattened parameter.
        shard_groups: process groups that sum the squares for norms of the whole parameter.
        whole_shape: shape of the parameter, if the tensor is a range of its flattened elements;
            else None.
        offload_share: number of elements that counts for placement on device or host; None for the
            tensor's own number.
        partition_dim: dimension of the parameter that tensor parallelism splits.
        partition_blocks: this rank's length of each block along that dimension.
        owned: range of flattened elements of each rank of ``shard_groups``; None if the elements
            are not split over these ranks.
    """

    first_element: int = 0
    shard_groups: tuple[ProcessGroup, ...] = ()
    whole_shape: torch.Size | None = None
    offload_share: int | None = None
    partition_dim: int | None = None
    partition_blocks: tuple[int, ...] = ()
    owned: FlatRanges | None = None


_WHOLE = ShardInfo()


def shard_info(param: Tensor) -> ShardInfo:
    """Return the ``ShardInfo`` of a tensor. A tensor without one counts as a whole parameter."""
    info: ShardInfo = getattr(param, "mp_optim_shard", _WHOLE)
    return info


def set_shard_info(tensor: Any, info: ShardInfo) -> None:
    """Set the ``ShardInfo`` of a tensor."""
    tensor.mp_optim_shard = info
