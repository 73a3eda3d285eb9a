"""Random layouts of a case."""

from __future__ import annotations

import dataclasses
from typing import Any

from lab.layout_fuzz.case import Layout, Settings
from lab.layout_fuzz.drawn_models import Chance


class DrawnLayouts:
    """Layouts of one case."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    def draw(self, kind: str, rule: str, world: str, rough: bool, changes: bool) -> Layout:
        found = Layout(kind)
        if kind == "copies":
            found = dataclasses.replace(
                found,
                mesh=self.copies_mesh(rule, world, rough or changes),
                settings=self.copies_settings(rule, rough),
            )
        elif kind == "fsdp":
            found = dataclasses.replace(found, mesh=self.fsdp_mesh(world))
        elif kind == "placed":
            sizes = self.chance.choice(((2,), (3,), (4,), (2, 2), (1, 3), (2, 1), (2, 2)))
            mesh = tuple((f"mesh{index}", size) for index, size in enumerate(sizes))
            found = dataclasses.replace(found, mesh=mesh, placements=self.chance.randrange(1000))
        if self.chance.often(0.6):
            fraction = self.chance.choice((0.3, 0.5, 1.0))
            # exchanged during backward by nobody
            parts = rule == "muon" and (
                kind in ("fsdp", "placed") or _is_flat(found.settings) or "tp" in dict(found.mesh)
            )
            modes = (
                ("sync", "overlap")
                if rule == "lamb" or parts
                else ("sync", "overlap", "speculative")
            )
            found = dataclasses.replace(found, fraction=fraction, mode=self.chance.choice(modes))
        return found

    def copies_mesh(self, rule: str, world: str, simple: bool) -> tuple[tuple[str, int], ...]:
        most = 4 if world == "processes" else 6
        if simple or self.chance.often(0.7):
            return (("dp", self.chance.randint(2, most)),)
        meshes = [
            (("dp", 2), ("ep", 2)),
            (("ep", 2),),
            (("dp", 1), ("ep", 3)),
            (("dp", 2), ("pp", 2)),
            (("dp", 1), ("pp", 3)),
        ]
        if rule != "lamb":  # its ratios are those of the parts, as Megatron's are
            meshes += [(("dp", 2), ("tp", 2)), (("dp", 1), ("tp", 2))]
        if world == "threads":
            meshes += [(("dp", 2), ("ep", 2), ("pp", 2))]
            meshes += [(("dp", 2), ("ep", 2), ("tp", 2))] if rule != "lamb" else []
        return self.chance.choice(meshes)

    def fsdp_mesh(self, world: str) -> tuple[tuple[str, int], ...]:
        small = self.chance.choice(
            (
                (("dp", 2),),
                (("dp", 3),),
                (("dp", 4),),
                (("dp_replicate", 2), ("dp_shard", 2)),
                (("dp", 2), ("tp", 2)),
                (("dp", 2), ("tp", 2)),
                (("dp", 2), ("ep", 2)),
                (("dp", 1), ("tp", 2)),
            )
        )
        if world == "processes" or self.chance.often(0.8):
            return small
        return self.chance.choice(
            (
                (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)),
                (("dp", 4), ("tp", 2)),
                (("dp", 3), ("tp", 2)),
                (("dp", 2), ("ep", 3)),
                (("dp", 6),),
                (("dp", 2), ("ep", 2), ("tp", 2)),
            )
        )

    def copies_settings(self, rule: str, rough: bool) -> Settings:
        strategies = (
            ("no_shard", "layer-wise", "optim", "optim_grads")
            if rule == "muon"
            else ("no_shard", "optim", "optim", "optim_grads", "optim_grads", "layer-wise")
        )
        strategy = self.chance.choice(strategies)
        settings: dict[str, Any] = {"data_parallel_sharding_strategy": strategy}
        if strategy == "layer-wise":
            settings = {"use_layer_wise_distributed_optimizer": True}
            if self.chance.often(0.3) and rule != "muon":
                settings["data_parallel_sharding_strategy"] = "optim_grads"
        elif self.chance.often(0.8):
            settings["bucket_size"] = self.chance.choice((1, 256, 512, 1000, 3000))
        if self.chance.often(0.5):
            settings["overlap_grad_reduce"] = True
        if strategy != "no_shard" and self.chance.often(0.4):
            settings["overlap_param_gather"] = True
        if self.chance.often(0.3):
            settings["grad_reduce_in_fp32"] = True
        if self.chance.often(0.3):
            settings["grad_reduce_op"] = "sum"
        if self.chance.often(0.1):
            settings["reduce_scatter_with_fp32_accumulation"] = True
        return tuple(settings.items())


def _is_flat(settings: Settings) -> bool:
    """Whether ranks share out the elements of flattened parameters."""
    return dict(settings).get("data_parallel_sharding_strategy") in ("optim", "optim_grads")
