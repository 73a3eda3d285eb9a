"""The few process groups over which an optimizer reduces, by their purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups by purpose; None means this process alone.

    Attributes:
        grad_stats: ranks that hold different dense parameters of one model copy (tensor x pipeline
            parallel).
        expert_grad_stats: ranks that hold different expert parameters (expert x tensor x pipeline
            parallel).
        tp: tensor-parallel ranks of dense parameters, to count duplicated parameters once.
        expert_tp: tensor-parallel ranks of expert parameters.
        dp: ranks that hold copies of dense parameters; a distributed optimizer reduces over them.
            With ``use_distributed_optimizer`` by default all ranks.
        expert_dp: ranks that hold copies of expert parameters; by default as dp.
        ep: ranks that hold different experts of one layer, which each counts from 0.
        pp: the stages of a pipeline, whose layers have a ``layer_number``. With several, building
            an optimizer is a collective of theirs.
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
        """Return groups from a mesh whose dimensions are named ``dp``, ``tp``, ``pp`` and ``ep``
        (any subset). Collective.

        Ranks along ``ep`` hold different experts and copies of the dense parameters, so the latter
        are data-parallel over it too.

        Raises:
            ValueError: the mesh has no names, or an unknown one.
        """
        names = mesh.mesh_dim_names
        known = {"dp", "dp_shard", "dp_replicate", "tp", "pp", "ep"}
        if not names or set(names) - known:
            raise ValueError(
                f"mesh_dim_names={names!r}: name every dimension, out of {sorted(known)}"
            )

        def over(*wanted: str) -> ProcessGroup | None:
            present = tuple(name for name in names if name in wanted)
            if not present:
                return None
            part = mesh[present]
            return part.get_group() if len(present) == 1 else part._flatten().get_group()

        copies = ("dp", "dp_shard", "dp_replicate")
        expert_dp = over(*copies)
        if expert_dp is None and "ep" in names:  # no two ranks hold the same expert
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
        """Return groups from any object with Megatron's attribute names (``mp``, ``tp``,
        ``expt_tp``, ``tp_ep_pp``, ...).

        Raises:
            ValueError: a group of several ranks is not supported here, naming it.
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
