"""Layouts: where a parameter of the model lies and how it is split over ranks, for rules that need it whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """Where the model's own tensor lies.

    Attributes:
        device: of the tensor, wherever the parameter is stepped.
        mesh: ranks it is split over; None if it is whole.
        placements: how, for each dimension of the mesh.
        shape, stride: of the whole.
    """

    device: torch.device
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    def _whole_matrices(self) -> list[Placement]:
        """The placements with the last two dimensions not split; a split of the others remains."""
        leading = len(self.shape) - 2
        return [p if p.is_shard() and getattr(p, "dim", leading) < leading else Replicate() for p in self.placements]

    @property
    def splits_matrices(self) -> bool:
        """Whether a rank has only a part of each matrix."""
        kept = self._whole_matrices()
        return any(p.is_shard() and p != keep for p, keep in zip(self.placements, kept, strict=True))

    def gather(self, local: Tensor) -> Tensor:
        """This rank's matrices whole, on the mesh's device. Collective."""
        return self._move(local, self.placements, self._whole_matrices())

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of what :meth:`gather` gave; nothing is sent."""
        return self._move(whole, self._whole_matrices(), self.placements)

    def _move(self, local: Tensor, source: tuple[Placement, ...] | list[Placement],
              target: tuple[Placement, ...] | list[Placement]) -> Tensor:
        assert self.mesh is not None
        spread = DTensor.from_local(local, self.mesh, source, run_check=False, shape=torch.Size(self.shape),
                                    stride=self.stride)
        moved = spread.redistribute(placements=target).to_local()
        return getattr(moved, "wait", lambda: moved)().contiguous()


def layout_of(param: Tensor, tensor_parallel: ProcessGroup | None = None) -> Layout:
    """The layout of a DTensor; of a plain tensor that Megatron's attributes say is one rank's part
    (``tensor_model_parallel``, ``partition_dim``); of any other plain tensor, which is whole.

    Args:
        tensor_parallel: the ranks that have the other parts of the second kind.
    """
    if isinstance(param, DTensor):
        return Layout(param.to_local().device, param.device_mesh, tuple(param.placements), tuple(param.shape),
                      tuple(param.stride()))
    dim = getattr(param, "partition_dim", -1)
    if tensor_parallel is None or tensor_parallel.size() == 1 or not getattr(param, "tensor_model_parallel", False) \
            or dim is None or dim < 0:
        return _whole(param.device)
    shape = list(param.shape)
    shape[dim] *= tensor_parallel.size()
    return Layout(param.device, _mesh(tensor_parallel, param.device.type), (Shard(dim),), tuple(shape),
                  torch.empty(shape, device="meta").stride())


@cache
def _whole(device: torch.device) -> Layout:
    return Layout(device)


@cache
def _mesh(group: ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)
