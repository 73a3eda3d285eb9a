"""The process groups over which an optimizer reduces, by purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups by purpose. None stands for this process alone.

    Attributes:
        grad_stats: ranks that have different dense parameters of one copy of the model (tensor x
            pipeline parallel); they sum the squares for the gradient norm.
        expert_grad_stats: ranks that have different expert parameters of one copy of the model
            (expert x tensor x pipeline parallel).
        tp: tensor-parallel ranks of dense parameters. A parameter that all of these ranks have is
            counted once in the norm.
        expert_tp: tensor-parallel ranks of expert parameters.
        dp: ranks that have copies of the dense parameters. A distributed optimizer reduces
            gradients over these ranks. With ``use_distributed_optimizer`` the default is all ranks.
        expert_dp: ranks that have copies of the expert parameters; by default ``dp``.
        ep: ranks that have different experts of one layer. Each rank numbers its experts from 0.
        pp: stages of a pipeline, whose layers have a ``layer_number``. With several stages,
            building an optimizer is a collective over the stages.
    """

    grad_stats: ProcessGroup | None = None
    expert_grad_stats: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    expert_tp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    expert_dp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    pp: ProcessGroup | None = None

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> ProcessGroups:
        """Return groups from a device mesh. Collective.

        Ranks along ``ep`` have different experts and copies of the dense parameters, so ``ep`` is a
        data-parallel dimension of dense parameters.

        Args:
            mesh: a mesh whose dimensions are named; any subset of ``dp``, ``dp_shard``,
                ``dp_replicate``, ``tp``, ``pp`` and ``ep``.

        Raises:
            ValueError: the mesh has no names, or an unknown name.
        """
        names = mesh.mesh_dim_names
        known = {"dp", "dp_shard", "dp_replicate", "tp", "pp", "ep"}
        if not names or set(names) - known:
            raise ValueError(
                f"mesh_dim_names={names!r}: a dimension has no name or an unknown one; give each "
                f"dimension one of the names {sorted(known)}"
            )

        def over(*wanted: str) -> ProcessGroup | None:
            present = tuple(name for name in names if name in wanted)
            if not present:
                return None
            part = mesh[present]
            return part.get_group() if len(present) == 1 else part._flatten().get_group()

        copies = ("dp", "dp_shard", "dp_replicate")
        expert_dp = over(*copies)
        # No two ranks have the same expert, so each rank reduces expert gradients alone.
        if expert_dp is None and "ep" in names:
            expert_dp = dist.new_subgroups(1)[0]  # type: ignore[no-untyped-call]
        return cls(
            grad_stats=over("tp", "pp"),
            expert_grad_stats=over("tp", "pp", "ep"),
            tp=over("tp"),
            expert_tp=over("tp"),
            dp=over(*copies, "ep"),
            expert_dp=expert_dp,
            ep=over("ep"),
            pp=over("pp"),
        )

    @classmethod
    def from_attributes(cls, groups: Any) -> ProcessGroups:
        """Return groups from any object with Megatron's attributes (``mp``, ``tp``, ``expt_tp``,
        ``tp_ep_pp``, ...), such as a ``ProcessGroupCollection``.

        Raises:
            ValueError: a group of several ranks belongs to generalised tensor parallelism, which is
                not supported; the message has its name.
        """
        for name in ("gtp_remat", "expt_gtp_remat"):
            group = getattr(groups, name, None)
            if group is not None and group.size() > 1:
                raise ValueError(
                    f"{name} has {group.size()} ranks: generalised tensor parallelism is not "
                    "supported; leave out --tensor-parallel-num-weight-shards and its expert "
                    "counterpart"
                )

        def first(*names: str) -> ProcessGroup | None:
            return next(
                (g for name in names if (g := getattr(groups, name, None)) is not None), None
            )

        return cls(
            grad_stats=first("mp"),
            expert_grad_stats=first("expt_tp_pp", "tp_ep_pp"),
            tp=first("tp"),
            expert_tp=first("expt_tp"),
            dp=first("dp_cp", "dp"),
            expert_dp=first("expt_dp"),
            ep=first("ep"),
            pp=first("pp"),
        )
