"""Attributes of parameters: those of Megatron and Transformer Engine, and attributes that layers of
this package set for each other. Only this module reads and writes them, except gradients, which
``tensors.py`` reads."""

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


def has_main_grad(param: Tensor) -> bool:
    """True if other code accumulates the parameter's gradient in ``main_grad``."""
    return getattr(param, "main_grad", None) is not None


def set_main_grad(param: Any, grad: Tensor | None) -> None:
    """Set ``main_grad``, the gradient that the next step uses."""
    param.main_grad = grad


def adds_to_main_grad(param: Tensor) -> bool:
    """True if a fused kernel has already added the gradient to ``main_grad`` (Megatron's
    ``grad_added_to_main_grad``)."""
    return bool(getattr(param, "grad_added_to_main_grad", False))


def clear_decoupled_grad(param: Any) -> None:
    """Clear ``decoupled_grad``, a gradient in another dtype than the parameter's."""
    if getattr(param, "decoupled_grad", None) is not None:
        param.decoupled_grad = None


ShownMains = dict[Slot, tuple[Any, Tensor]]
"""For each slot whose parameter has a ``main_param`` attribute, the parameter and its main param.
Weak references are not possible: ``torch.utils.swap_tensors`` refuses parameters that have any."""


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
            continue  # Another optimizer has set its main param on this parameter since then.
        del param.main_param
        if hasattr(param, "main_param_sharded"):
            del param.main_param_sharded
    shown.clear()


def main_param_of(param: Tensor) -> Tensor | None:
    """Return ``param.main_param``, which :func:`set_main_param` sets, or None."""
    main: Tensor | None = getattr(param, "main_param", None)
    return main


# -- attributes that Megatron sets ----------------------------------------------------------------


def is_shared(param: Tensor) -> bool:
    """True if another rank counts this parameter's gradient in the norm (``shared``)."""
    return bool(getattr(param, "shared", False))


def grad_norm_group(param: Tensor) -> str | None:
    """Return the name of the norm that the gradient counts in (``grad_norm_group``), None for the
    model's main norm."""
    group: str | None = getattr(param, "grad_norm_group", None)
    return group


def is_tensor_parallel(param: Tensor) -> bool:
    """True if the ranks of a tensor-parallel group have different parts
    (``tensor_model_parallel``)."""
    return bool(getattr(param, "tensor_model_parallel", False))


def is_copied_in_tensor_parallel(param: Tensor) -> bool:
    """True if ``tensor_model_parallel`` is set to False, so the ranks of a tensor-parallel group
    have copies of the parameter."""
    return getattr(param, "tensor_model_parallel", True) is False


def partition_dim(param: Tensor) -> int | None:
    """Return the dimension that tensor parallelism splits (``partition_dim``), or None."""
    dim: int | None = getattr(param, "partition_dim", None)
    return None if dim is None or dim < 0 else dim


def has_partition_dim(param: Tensor) -> bool:
    """True if ``partition_dim`` is set, to any value."""
    return hasattr(param, "partition_dim")


def partition_stride(param: Tensor) -> int:
    """Return the number of equal blocks of the split dimension (``partition_stride``). Each block
    is split over the ranks."""
    return int(getattr(param, "partition_stride", 1))


def partition_sizes(param: Tensor) -> tuple[int, ...] | None:
    """Return this rank's length of each block, if blocks differ in size (``partition_sizes``); else
    None."""
    sizes = getattr(param, "partition_sizes", None)
    return None if sizes is None else tuple(map(int, sizes))


def partition_blocks(param: Tensor) -> tuple[int, ...]:
    """Return this rank's length of each block along ``partition_dim``, in order; empty without a
    valid ``partition_dim``.

    If the attributes do not fit the length of the dimension, the dimension counts as one block.
    """
    dim = partition_dim(param)
    if dim is None or dim >= param.dim():
        return ()
    sizes, stride = partition_sizes(param), partition_stride(param)
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


def is_tied_embedding(param: Tensor) -> bool:
    """True if the first and last pipeline stage have copies of this parameter
    (``shared_embedding``)."""
    return bool(getattr(param, "shared_embedding", False))


def marked_embedding_or_output(param: Tensor) -> bool | None:
    """Return the attribute ``is_embedding_or_output_parameter``, or None if it is not set."""
    marked = getattr(param, "is_embedding_or_output_parameter", None)
    return None if marked is None else bool(marked)


def is_qkv(param: Tensor) -> bool:
    """True if the weight fuses queries, keys and values (``is_qkv``)."""
    return bool(getattr(param, "is_qkv", False))


def qkv_split_shapes(param: Tensor) -> tuple[int, ...] | None:
    """Return the numbers of rows of queries, keys and values in a query group
    (``qkv_split_shapes``), or None if the attribute is not set."""
    parts = getattr(param, "qkv_split_shapes", None)
    return None if parts is None else tuple(map(int, parts))


def is_for_muon(param: Tensor) -> bool:
    """True unless a matrix is marked for the scalar optimizer instead of Muon
    (``use_muon=False``)."""
    return bool(getattr(param, "use_muon", True))


def is_laid_out_whole(param: Tensor) -> bool:
    """True if one rank has the whole parameter in Megatron's buffer
    (``is_managed_by_layer_wise_optimizer``)."""
    return bool(getattr(param, "is_managed_by_layer_wise_optimizer", False))


REFUSED = {
    "is_gtp_weight_remat": (
        "generalised tensor parallelism is not in this version, and norms and matrices would be "
        "wrong; leave out --tensor-parallel-num-weight-shards and its expert counterpart"
    ),
    "__fsdp_param__": (
        "Megatron-FSDP is not in this version; use torch's FSDP2 (--use-torch-fsdp2), whose "
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
    """Return the attributes that are set for norms and tensor-parallel splits, by name."""
    return {name: getattr(param, name) for name in _NORM_ATTRIBUTES if hasattr(param, name)}


def set_norm_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    """Set attributes that :func:`norm_attributes` returned for another tensor."""
    for name, value in attributes.items():
        setattr(tensor, name, value)


# -- attributes that layers of this package set for each other ------------------------------------


@dataclass(frozen=True)
class FlatRanges:
    """The range of one flattened parameter that each rank of a flat buffer has.

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


def reducer_of(param: Tensor) -> int | None:
    """Return the number of the active reducer of this parameter's gradient, or None."""
    number: int | None = getattr(param, "reduced_by", None)
    return number


def set_reducer(param: Any, number: int) -> None:
    """Set the number of the active reducer. A plain number keeps the parameter picklable."""
    param.reduced_by = number


def unset_reducer(param: Any, grad: Tensor | None) -> None:
    """Remove the number of the active reducer, and remove ``main_grad`` if it is the given
    gradient."""
    del param.reduced_by
    if grad is not None and getattr(param, "main_grad", None) is grad:
        del param.main_grad
