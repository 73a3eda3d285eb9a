"""Attributes that live on parameters: Megatron's names, and what layers of this package tell each
other about a tensor. They are read and written here alone; gradients are read in ``tensors.py``."""

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

# -- gradients and main params, as Megatron and Transformer Engine leave them ---------------------


def has_main_grad(param: Tensor) -> bool:
    """Whether something else gathers the parameter's gradient in ``main_grad``."""
    return getattr(param, "main_grad", None) is not None


def set_main_grad(param: Any, grad: Tensor | None) -> None:
    """Let this be the gradient that is stepped with."""
    param.main_grad = grad


def adds_to_main_grad(param: Tensor) -> bool:
    """Megatron's ``grad_added_to_main_grad``: a fused kernel has added the gradient already."""
    return bool(getattr(param, "grad_added_to_main_grad", False))


def clear_decoupled_grad(param: Any) -> None:
    """Let go of a gradient in another dtype than the parameter's."""
    if getattr(param, "decoupled_grad", None) is not None:
        param.decoupled_grad = None


ShownMains = dict[Slot, tuple[Any, Tensor]]
"""Parameter and main param of each slot whose parameter shows one. No weak references:
``torch.utils.swap_tensors`` refuses parameters that have some."""


def shown_mains_of(owner: object) -> ShownMains:
    """Return an empty record for :func:`set_main_param`. Its main params are taken from the model's
    parameters when the owner is freed."""
    shown: ShownMains = {}
    weakref.finalize(owner, _hide_main_params, shown).atexit = False
    return shown


def set_main_param(
    shown: ShownMains, slot: Slot, param: Any, main: Tensor, sharded: bool | None = None
) -> None:
    """Set ``param.main_param``, as Megatron does.

    Args:
        shown: record of the optimizer, which gets this slot's entry.
        sharded: whether the main param is only the elements that this rank owns
            (``main_param_sharded``), if that is known.
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
            continue  # another optimizer has set its own since
        del param.main_param
        if hasattr(param, "main_param_sharded"):
            del param.main_param_sharded
    shown.clear()


def main_param_of(param: Tensor) -> Tensor | None:
    """What :func:`set_main_param` put there."""
    main: Tensor | None = getattr(param, "main_param", None)
    return main


# -- what Megatron says about a parameter ---------------------------------------------------------


def is_shared(param: Tensor) -> bool:
    """``shared``: another rank counts this parameter's gradient in the norm."""
    return bool(getattr(param, "shared", False))


def grad_norm_group(param: Tensor) -> str | None:
    """``grad_norm_group``: the norm that the gradient counts in, if not the model's main one."""
    group: str | None = getattr(param, "grad_norm_group", None)
    return group


def is_tensor_parallel(param: Tensor) -> bool:
    """``tensor_model_parallel``: the ranks of a tensor-parallel group have different parts."""
    return bool(getattr(param, "tensor_model_parallel", False))


def is_copied_in_tensor_parallel(param: Tensor) -> bool:
    """``tensor_model_parallel`` is there and false: the ranks of a group have copies."""
    return getattr(param, "tensor_model_parallel", True) is False


def partition_dim(param: Tensor) -> int | None:
    """``partition_dim``: the dimension along which tensor parallelism cuts; None if along none."""
    dim: int | None = getattr(param, "partition_dim", None)
    return None if dim is None or dim < 0 else dim


def has_partition_dim(param: Tensor) -> bool:
    """Whether the attribute is there at all."""
    return hasattr(param, "partition_dim")


def partition_stride(param: Tensor) -> int:
    """``partition_stride``: how many equal blocks that dimension consists of, each of which is
    cut."""
    return int(getattr(param, "partition_stride", 1))


def partition_sizes(param: Tensor) -> tuple[int, ...] | None:
    """``partition_sizes``: what a rank has of blocks that are not equal; None if they are."""
    sizes = getattr(param, "partition_sizes", None)
    return None if sizes is None else tuple(map(int, sizes))


def partition_blocks(param: Tensor) -> tuple[int, ...]:
    """What a rank has of each block along ``partition_dim``, one after the other; of a dimension
    that is no such blocks, all of it as one."""
    dim = partition_dim(param)
    if dim is None or dim >= param.dim():
        return ()
    sizes, stride = partition_sizes(param), partition_stride(param)
    length = param.shape[dim]
    if sizes is not None:
        return sizes if sum(sizes) == length else (length,)
    return (length // stride,) * stride if stride and not length % stride else (length,)


def is_dense_in_megatron(param: Tensor) -> bool:
    """``allreduce``: false on the parameters of experts."""
    return bool(getattr(param, "allreduce", True))


def is_expert_param(param: Tensor, name: str) -> bool:
    """Megatron's ``allreduce=False``, or Hugging Face's ``.experts.`` (shared experts are
    dense)."""
    if not is_dense_in_megatron(param):
        return True
    return ".experts." in f".{name}" and "shared_experts" not in name


def is_tied_embedding(param: Tensor) -> bool:
    """``shared_embedding``: stages of a pipeline have copies of this, the first and the last."""
    return bool(getattr(param, "shared_embedding", False))


def marked_embedding_or_output(param: Tensor) -> bool | None:
    """``is_embedding_or_output_parameter``; None if nothing is said."""
    said = getattr(param, "is_embedding_or_output_parameter", None)
    return None if said is None else bool(said)


def is_qkv(param: Tensor) -> bool:
    """``is_qkv``: queries, keys and values in one weight."""
    return bool(getattr(param, "is_qkv", False))


def qkv_split_shapes(param: Tensor) -> tuple[int, ...] | None:
    """``qkv_split_shapes``: the rows of each part in a query group; None if nothing is said."""
    parts = getattr(param, "qkv_split_shapes", None)
    return None if parts is None else tuple(map(int, parts))


def is_for_muon(param: Tensor) -> bool:
    """``use_muon``: false on a matrix that Muon leaves to the scalar optimizer."""
    return bool(getattr(param, "use_muon", True))


def is_laid_out_whole(param: Tensor) -> bool:
    """``is_managed_by_layer_wise_optimizer``: one rank has all of it in Megatron's buffer."""
    return bool(getattr(param, "is_managed_by_layer_wise_optimizer", False))


REFUSED = {
    "is_gtp_weight_remat": (
        "generalised tensor parallelism is not in this version, its norms and matrices would be "
        "wrong: leave out --tensor-parallel-num-weight-shards and its expert counterpart"
    ),
    "__fsdp_param__": (
        "Megatron-FSDP is not in this version: use torch's FSDP2 (--use-torch-fsdp2), whose "
        "DTensors are stepped shard by shard"
    ),
}
"""Attributes of parameters that ask for what there is none of here, and what to do instead."""


def check_attributes(name: str, param: Tensor) -> None:
    """Raise ValueError if one of the :data:`REFUSED` attributes is true, naming the parameter."""
    for attribute, reason in REFUSED.items():
        if value := getattr(param, attribute, False):
            raise ValueError(f"{attribute}={value!r} on {name}: {reason}")


def norm_attributes(param: Tensor) -> dict[str, Any]:
    """The attributes that say in which norm a gradient counts, and how tensor parallelism splits
    it, where they are set."""
    return {name: getattr(param, name) for name in _NORM_ATTRIBUTES if hasattr(param, name)}


def set_norm_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    """Give a tensor what :func:`norm_attributes` read from another."""
    for name, value in attributes.items():
        setattr(tensor, name, value)


# -- what layers of this package tell each other --------------------------------------------------


@dataclass(frozen=True)
class FlatRanges:
    """Which elements of a flattened parameter each rank has, of those that share a flat buffer.

    Attributes:
        bounds: where each rank's shard of the buffer begins, and where the last one ends.
        first, numel: place of the parameter in the buffer, and its size.
    """

    bounds: tuple[int, ...]
    first: int
    numel: int

    def ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of each rank, in elements of the parameter."""
        places = [min(max(b - self.first, 0), self.numel) for b in self.bounds]
        return list(itertools.pairwise(places))


@dataclass(frozen=True)
class ShardInfo:
    """Of a tensor that is a rank's part of a parameter.

    Attributes:
        first_element: of the flattened parameter that is in the tensor.
        shard_groups: process groups over which the parameter's norms are added up.
        whole_shape: of the parameter, if the tensor is a range of its flattened elements.
        offload_share: elements by which it is placed on device or host, if not its own number.
        partition_dim: of the parameter, along which tensor parallelism cuts it.
        partition_blocks: what is here of each block along it.
        owned: of the ranks of ``shard_groups``, in order, the range of flattened elements that each
            has; None if they are not split.
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
    """What part of a parameter this is; all of it if nothing was said."""
    info: ShardInfo = getattr(param, "mp_optim_shard", _WHOLE)
    return info


def set_shard_info(tensor: Any, info: ShardInfo) -> None:
    """Say what part of a parameter a tensor is."""
    tensor.mp_optim_shard = info


def reducer_of(param: Tensor) -> int | None:
    """The number of the reducer whose hook on this parameter is in force."""
    number: int | None = getattr(param, "reduced_by", None)
    return number


def set_reducer(param: Any, number: int) -> None:
    """Put a reducer's hook in force: a plain number, so that the parameter can still be pickled."""
    param.reduced_by = number


def unset_reducer(param: Any, grad: Tensor | None) -> None:
    """Undo :func:`set_reducer`, and :func:`set_main_grad` if it set this gradient."""
    del param.reduced_by
    if grad is not None and getattr(param, "main_grad", None) is grad:
        del param.main_grad
