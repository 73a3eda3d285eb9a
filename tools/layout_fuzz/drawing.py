"""A case from a seed: a pure function, so that a number is all that has to be written down."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from layout_fuzz.case import (
    BadGradient,
    Case,
    Disagreement,
    Layer,
    Layout,
    Param,
    Settings,
)

__all__ = ["draw"]

_SHAPES = (
    (6,),
    (1,),
    (3,),
    (16,),
    (300,),
    (520,),
    (8, 6),
    (4, 4),
    (16, 24),
    (3, 5),
    (1, 9),
    (30, 20),
    (4, 6, 8),
)
_MOMENTS_ANYWHERE = (
    "fp32",
    "bf16",
    "bf16",
    "fp16",
    "bf16-remainder",
    "bf16-master",
    "bf16-moments",
)
_MOMENTS_IN_BLOCKS = ("bf16-8bit", "bf16-8bit8", "bf16-half", "bf16-stochastic")


def draw(seed: int) -> Case:
    """The case of a number."""
    return _Draw(seed).case()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed, self.random, self.empty = seed, random.Random(seed), False

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def case(self) -> Case:
        pick = self.random
        if self.often(0.1):
            return self.disagreement()
        rule = pick.choice(
            ("adam", "adam", "adam", "sgd", "lion", "lamb", "muon", "muon")
        )
        kinds = pick.choice(
            (
                ("copies",),
                ("copies",),
                ("copies",),
                ("fsdp",),
                ("fsdp",),
                ("placed",),
                ("copies", "copies"),
                ("copies", "fsdp"),
                ("fsdp", "copies"),
                ("fsdp", "fsdp"),
                ("placed", "fsdp"),
                ("copies", "alone"),
                ("alone", "copies"),
                ("fsdp", "alone"),
            )
        )
        world = "processes" if self.often(0.15) else "threads"
        rough = kinds == ("copies",) and self.often(0.3)
        layouts = tuple(
            self.layout(kind, rule, world, rough, len(kinds) > 1) for kind in kinds
        )
        blocks = all(
            layout.kind in ("copies", "alone") and layout.size("tp") == 1
            for layout in layouts
        )
        precision = pick.choice(
            _MOMENTS_ANYWHERE + (_MOMENTS_IN_BLOCKS if blocks else ())
        )
        layers = self.layers(layouts, rule, precision)
        case = Case(self.seed, world, rule, precision, layers, layouts, rough=rough)
        return self.schedule(case)

    # -- layouts ----------------------------------------------------------------------------------

    def layout(
        self, kind: str, rule: str, world: str, rough: bool, changes: bool
    ) -> Layout:
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
            sizes = self.random.choice(
                ((2,), (3,), (4,), (2, 2), (1, 3), (2, 1), (2, 2))
            )
            mesh = tuple((f"mesh{index}", size) for index, size in enumerate(sizes))
            found = dataclasses.replace(
                found, mesh=mesh, placements=self.random.randrange(1000)
            )
        if self.often(0.6):
            fraction = self.random.choice((0.3, 0.5, 1.0))
            # exchanged during backward by nobody
            parts = rule == "muon" and (
                kind in ("fsdp", "placed")
                or _is_flat(found.settings)
                or "tp" in dict(found.mesh)
            )
            modes = (
                ("sync", "overlap")
                if rule == "lamb" or parts
                else ("sync", "overlap", "speculative")
            )
            found = dataclasses.replace(
                found, fraction=fraction, mode=self.random.choice(modes)
            )
        return found

    def copies_mesh(
        self, rule: str, world: str, simple: bool
    ) -> tuple[tuple[str, int], ...]:
        most = 4 if world == "processes" else 6
        if simple or self.often(0.7):
            return (("dp", self.random.randint(2, most)),)
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
        return self.random.choice(meshes)

    def fsdp_mesh(self, world: str) -> tuple[tuple[str, int], ...]:
        small = self.random.choice(
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
        if world == "processes" or self.often(0.8):
            return small
        return self.random.choice(
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
            else (
                "no_shard",
                "optim",
                "optim",
                "optim_grads",
                "optim_grads",
                "layer-wise",
            )
        )
        strategy = self.random.choice(strategies)
        settings: dict[str, Any] = {"data_parallel_sharding_strategy": strategy}
        if strategy == "layer-wise":
            settings = {"use_layer_wise_distributed_optimizer": True}
            if self.often(0.3) and rule != "muon":
                settings["data_parallel_sharding_strategy"] = "optim_grads"
        elif self.often(0.8):
            settings["bucket_size"] = self.random.choice((1, 256, 512, 1000, 3000))
        if self.often(0.5):
            settings["overlap_grad_reduce"] = True
        if strategy != "no_shard" and self.often(0.4):
            settings["overlap_param_gather"] = True
        if self.often(0.3):
            settings["grad_reduce_in_fp32"] = True
        if self.often(0.3):
            settings["grad_reduce_op"] = "sum"
        if self.often(0.1):
            settings["reduce_scatter_with_fp32_accumulation"] = True
        return tuple(settings.items())

    # -- the model --------------------------------------------------------------------------------

    def layers(
        self, layouts: tuple[Layout, ...], rule: str, precision: str
    ) -> tuple[Layer, ...]:
        ep = max(layout.size("ep") for layout in layouts)
        fsdp = any(layout.kind == "fsdp" for layout in layouts)
        self.empty = not fsdp  # torch: "_chunk_cat expects non-empty tensor"
        experts = (
            0
            if ep == 1 and self.often(0.4)
            else self.random.choice((1, 2, 4)) * (1 if ep == 1 else ep)
        )
        found = [
            self.layer(f"blocks.{index}", precision)
            for index in range(self.random.randint(1, 4))
        ]
        found += [
            self.layer(
                f"experts.{index}", precision, depth=ep if fsdp and ep > 1 else 0
            )
            for index in range(experts)
        ]
        plain = all(layout.kind == "copies" for layout in layouts)
        if (
            self.often(0.2)
            and not fsdp
            and len(found) > 1
            and not any(layout.size("ep") > 1 for layout in layouts)
        ):
            found = self.tied(found)
        streams = self.streams(layouts)
        return tuple(self.skipping(layer, streams, plain) for layer in found)

    def layer(self, name: str, precision: str, depth: int = 0) -> Layer:
        params = []
        for index in range(self.random.randint(1, 3)):
            shape = self.random.choice(_SHAPES)
            if self.empty and self.often(0.06):
                shape = (0, 8)
            if depth:  # experts in one tensor, so that they can be split
                shape = (
                    depth * self.random.choice((1, 2)),
                    self.random.choice((4, 5, 6)),
                    6,
                )
            splits = self.random.randrange(len(shape)) if self.often(0.7) else None
            params.append(
                Param("wbc"[index], shape, frozen=self.often(0.06), splits=splits)
            )
        if all(param.frozen for param in params):
            params[0] = dataclasses.replace(params[0], frozen=False)
        return Layer(name, tuple(params), fp32=precision != "fp32" and self.often(0.2))

    def tied(self, found: list[Layer]) -> list[Layer]:
        """The last dense layer has the first one's first parameter too."""
        dense = [layer for layer in found if not layer.is_expert]
        first, last = dense[0], dense[-1]
        if first is last or first.params[0].frozen or first.fp32 != last.fp32:
            return found
        return [
            dataclasses.replace(layer, tied_to=first.name) if layer is last else layer
            for layer in found
        ]

    def streams(self, layouts: tuple[Layout, ...]) -> int:
        return (
            max(2, max(layout.data_ranks for layout in layouts))
            if max(layout.data_ranks for layout in layouts) <= 4
            else max(layout.data_ranks for layout in layouts)
        )

    def skipping(self, layer: Layer, streams: int, plain: bool) -> Layer:
        """Which streams do not use a layer: experts without tokens, mostly."""
        if not self.often(0.6 if layer.is_expert else 0.1):
            return layer
        skips = []
        for _ in range(self.random.randint(1, 3)):
            count = self.random.randint(
                0, streams if plain and self.often(0.2) else streams - 1
            )
            skips.append(tuple(sorted(self.random.sample(range(streams), count))))
        return dataclasses.replace(layer, skips=tuple(skips))

    # -- the schedule -----------------------------------------------------------------------------

    def schedule(self, case: Case) -> Case:
        pick, kinds = self.random, {layout.kind for layout in case.layouts}
        steps = pick.randint(2, 4) if len(case.layouts) == 1 else pick.randint(2, 5)
        streams = self.streams(case.layouts)
        parts = pick.choice((1, 1, 2, 3))
        if streams * parts * max(streams, 1) > 64:
            parts = 1  # sums have to fit a bfloat16
        scales = tuple(pick.randint(-3, 2) for _ in range(pick.randint(1, 3)))
        norm = math.sqrt(
            sum(
                math.prod(param.shape)
                for layer in case.layers
                for param in layer.params
            )
            * streams
            * parts
            * 0.1
        ) * 2.0 ** max(scales)
        reduced_at_once = any(
            layout.setting("overlap_grad_reduce")
            and layout.setting("data_parallel_sharding_strategy") != "optim_grads"
            for layout in case.layouts
        )
        rough = case.rough or "alone" in kinds
        bad = (
            BadGradient(
                pick.randrange(steps),
                pick.randrange(streams),
                pick.choice(case.layers).name,
                pick.choice((math.nan, math.inf, -math.inf)),
            )
            if self.often(0.2)
            else None
        )
        changes: dict[str, Any] = {
            "steps": steps,
            "change": steps if len(case.layouts) == 1 else pick.randint(1, steps - 1),
            "streams": streams,
            "parts": parts,
            "scales": scales,
            "bad": bad,
            "deferred": parts > 1
            and (reduced_at_once or case.rough or self.often(0.5)),
            "clip": pick.choice((0.0, 0.0, 1e6, norm / 3)),
            "zeros": self.often(0.2) and not rough,
            "threshold": norm * 2.0 ** pick.randint(-2, 2)
            if self.often(0.2)
            else math.inf,
            "halve_lr": tuple(step for step in range(1, steps) if self.often(0.15)),
            "background": case.world == "processes" and self.often(0.5),
            "settings": self.settings(case),
        }
        return case.with_(**changes)

    def settings(self, case: Case) -> Settings:
        found: dict[str, Any] = {}
        if case.rule == "adam" and self.often(0.2):
            found["decoupled_weight_decay"] = False
        if case.rule == "muon":
            found |= {
                "muon_scalar_optimizer": self.random.choice(("adam", "lion")),
                "muon_use_nesterov": self.often(0.5),
            }
        if case.rule == "lamb":
            found["lamb_use_nvlamb"] = self.often(0.5)
        return tuple((found | self.averages(case)).items())

    def averages(self, case: Case) -> dict[str, Any]:
        """Of a third of the cases; drawn apart, so that nothing else of a case depends on it."""
        apart = random.Random(f"averages {self.seed}")
        if apart.random() > 1 / 3:
            return {}
        rounded = case.precision.endswith("stochastic") and apart.random() < 0.5
        return {"ema_decay": 0.75} | ({"ema_dtype": "bfloat16"} if rounded else {})

    # -- ranks that disagree ----------------------------------------------------------------------

    def disagreement(self) -> Case:
        """A small case in which a rank does something else; among processes, because ranks wait for
        each other."""
        pick = self.random
        fsdp = self.often(0.4)
        ranks = pick.randint(2, 4)
        if fsdp:
            mesh = (
                (("dp", ranks),)
                if self.often(0.7)
                else (("dp_replicate", 2), ("dp_shard", 2))
            )
            layout = Layout("fsdp", mesh)
        else:
            layout = Layout(
                "copies", (("dp", ranks),), settings=self.copies_settings("adam", False)
            )
        built = self.often(0.3) if not fsdp else self.often(0.6)
        what = pick.choice(
            ("clip_grad", "lr when built")
            if built
            else ("lr",)
            if fsdp
            else ("lr", "zero_grad", "zero_grad", "freeze", "freeze")
        )
        odd = Disagreement(
            what, pick.randrange(layout.ranks), -1 if built else pick.randint(1, 2)
        )
        layers = tuple(
            self.layer(f"blocks.{index}", "bf16") for index in range(pick.randint(1, 3))
        )
        return Case(
            self.seed,
            "processes",
            "adam",
            "bf16",
            layers,
            (layout,),
            steps=4,
            change=4,
            streams=layout.ranks,
            clip=1.0,
            disagreement=odd,
        )


def _is_flat(settings: Settings) -> bool:
    """Whether ranks share out the elements of flattened parameters."""
    return dict(settings).get("data_parallel_sharding_strategy") in (
        "optim",
        "optim_grads",
    )
