"""A case from a seed: a pure function, so that a number is all that has to be written down."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from lab.layout_fuzz.by_class import CLASSES, WORDS
from lab.layout_fuzz.case import BadGradient, Case, Disagreement, Layout, Settings
from lab.layout_fuzz.drawn_layouts import DrawnLayouts
from lab.layout_fuzz.drawn_models import Chance, DrawnModel, streams_of
from lab.layout_fuzz.running import OTHER_SETTINGS

_RULES = ("adam", "adam", "adam", "sgd", "lion", "lamb", "muon", "muon")
_KINDS = (
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
"""Of the layout that a run begins in, and of the one that it goes on in."""
_MOMENTS_ANYWHERE = ("fp32", "bf16", "bf16", "fp16", "bf16-remainder", "bf16-master", "bf16-bf16")
_MOMENTS_IN_BLOCKS = ("bf16-8bit", "bf16-8bit8", "bf16-fp16", "bf16-stochastic")


def draw(seed: int) -> Case:
    return _Draw(seed).case()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, Chance(seed)
        self.layouts, self.model = DrawnLayouts(self.chance), DrawnModel(self.chance)

    def case(self) -> Case:
        pick = self.chance
        if self.chance.often(0.1):
            return self.disagreement()
        rule = pick.choice(_RULES)
        kinds = pick.choice(_KINDS)
        world = "processes" if self.chance.often(0.15) else "threads"
        rough = kinds == ("copies",) and self.chance.often(0.3)
        layouts = tuple(
            self.layouts.draw(kind, rule, world, rough, len(kinds) > 1) for kind in kinds
        )
        layouts = tuple(self.placed(layout, index, rule) for index, layout in enumerate(layouts))
        blocks = all(
            layout.kind in ("copies", "alone") and layout.size("tp") == 1 for layout in layouts
        )
        precision = pick.choice(_MOMENTS_ANYWHERE + (_MOMENTS_IN_BLOCKS if blocks else ()))
        precision = self.main_params(precision, rule, layouts)
        layers = self.model.layers(layouts, rule, precision)
        case = Case(self.seed, world, rule, precision, layers, layouts, rough=rough)
        return self.schedule(case)

    def placed(self, layout: Layout, phase: int, rule: str) -> Layout:
        apart = random.Random(f"place {phase} {self.seed}")
        if not layout.fraction or rule in ("lamb", "muon") or apart.random() < 0.6:
            return layout
        if apart.random() < 0.5:
            return replace(layout, place="disk")
        return replace(layout, place="streamed", mode="sync")

    def main_params(self, precision: str, rule: str, layouts: tuple[Layout, ...]) -> str:
        apart = random.Random(f"main params {self.seed}")
        is_exact = rule not in ("lamb", "muon")
        if not (is_exact and precision.startswith("bf16")) or apart.random() > 1 / 3:
            return precision
        runs = all(layout.kind != "placed" and layout.size("tp") == 1 for layout in layouts)
        return "bf16-lone" if runs else precision

    # -- the schedule -----------------------------------------------------------------------------

    def schedule(self, case: Case) -> Case:
        pick, kinds = self.chance, {layout.kind for layout in case.layouts}
        steps = pick.randint(2, 4) if len(case.layouts) == 1 else pick.randint(2, 5)
        streams = streams_of(case.layouts)
        parts = pick.choice((1, 1, 2, 3))
        if streams * parts * max(streams, 1) > 64:
            parts = 1  # sums have to fit a bfloat16
        scales = tuple(pick.randint(-3, 2) for _ in range(pick.randint(1, 3)))
        norm = math.sqrt(
            sum(math.prod(param.shape) for layer in case.layers for param in layer.params)
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
        bad = self.bad_gradient(case, steps, streams) if self.chance.often(0.2) else None
        changes: dict[str, Any] = {
            "steps": steps,
            "change": steps if len(case.layouts) == 1 else pick.randint(1, steps - 1),
            "streams": streams,
            "parts": parts,
            "scales": scales,
            "bad": bad,
            "deferred": parts > 1 and (reduced_at_once or case.rough or self.chance.often(0.5)),
            "clip": pick.choice((0.0, 0.0, 1e6, norm / 3)),
            "zeros": self.chance.often(0.2) and not rough,
            "threshold": norm * 2.0 ** pick.randint(-2, 2) if self.chance.often(0.2) else math.inf,
            "halve_lr": tuple(step for step in range(1, steps) if self.chance.often(0.15)),
            "background": case.world == "processes" and self.chance.often(0.5),
            "settings": self.settings(case),
            "publishes": self.publishes(steps),
        }
        case = case.with_(**changes, **self.writes(case, steps), **self.lives(case))
        return self.by_class(case)

    def by_class(self, case: Case) -> Case:
        """Draw tenants, and overrides for a class if no layout needs the factory."""
        apart = random.Random(f"classes {self.seed}")
        case = case.with_(tenants=apart.random() < 0.1)
        needs_factory = any(layout.kind == "copies" for layout in case.layouts)
        if apart.random() < 0.5 or needs_factory or case.rule not in CLASSES:
            return case
        name = apart.choice(case.layers).name
        rate = ("lr", 2.0 ** apart.randint(-8, -4))
        decay = ("weight_decay", apart.choice((0.0, 0.5)))
        overrides = apart.choice(
            (
                ((f"{name}.*", (rate,)),),
                (("*.w", (decay,)), (f"{name}.*", (rate,))),
                ((f"*.c|*.b|{name}.w", (rate, decay)),),
            )
        )
        precision = case.precision if case.precision in WORDS else "bf16"
        plain: dict[str, Any] = {"threshold": math.inf, "zeros": False, "settings": ()}
        return case.with_(precision=precision, overrides=overrides, averaged=(), **plain)

    def lives(self, case: Case) -> dict[str, bool]:
        """Whether gradients arrive late, and whether ranks save alone; drawn apart, so that nothing
        else of a case depends on it. ZeRO-2 reduces late gradients, for which all ranks need a
        backward pass."""
        apart = random.Random(f"lives {self.seed}")
        settings = [layout.setting("data_parallel_sharding_strategy") for layout in case.layouts]
        first = case.layouts[0]
        shared = first.kind in ("copies", "fsdp") and {name for name, _ in first.mesh} == {"dp"}
        return {
            "late": apart.random() < 0.3 and "optim_grads" not in settings,
            "shrinks": apart.random() < 0.5 and shared and case.world == "processes",
        }

    def publishes(self, steps: int) -> tuple[int, ...]:
        apart = random.Random(f"publishes {self.seed}")
        if apart.random() < 0.5:
            return ()
        return tuple(step for step in range(steps) if apart.random() < 0.6 or step == steps - 1)

    def writes(self, case: Case, steps: int) -> dict[str, Any]:
        apart = random.Random(f"writes {self.seed}")
        scaled = tuple(step for step in range(steps) if apart.random() < 0.15)
        averaged = tuple(step for step in range(steps) if apart.random() < 0.3)
        kept = "ema_decay" in self.averages(case)
        written = tuple(step for step in range(steps) if apart.random() < 0.15)
        return {"scaled": scaled, "written": written, "averaged": averaged if kept else ()}

    def bad_gradient(self, case: Case, steps: int, streams: int) -> BadGradient:
        pick = self.chance
        return BadGradient(
            pick.randrange(steps),
            pick.randrange(streams),
            pick.choice(case.layers).name,
            pick.choice((math.nan, math.inf, -math.inf)),
        )

    def settings(self, case: Case) -> Settings:
        found: dict[str, Any] = {}
        if case.rule == "adam" and self.chance.often(0.2):
            found["decoupled_weight_decay"] = False
        if case.rule == "muon":
            found |= {
                "muon_scalar_optimizer": self.chance.choice(("adam", "lion")),
                "muon_use_nesterov": self.chance.often(0.5),
                **self.rows(case),
            }
        if case.rule == "lamb":
            found["lamb_use_nvlamb"] = self.chance.often(0.5)
        found |= self.cautious_decay(case, found) | self.averages(case) | self.small_state(case)
        return tuple(found.items())

    def rows(self, case: Case) -> dict[str, Any]:
        apart = random.Random(f"rows {self.seed}")
        if apart.random() < 0.5 or _ahead_on_ranks(case):
            return {}
        return {"muon_moment2_method": "normuon", "muon_beta2": apart.choice((0.0, 0.6, 0.95))}

    def cautious_decay(self, case: Case, found: dict[str, Any]) -> dict[str, Any]:
        apart = random.Random(f"cautions {self.seed}")
        has_it = case.rule in ("adam", "lion") and found.get("decoupled_weight_decay", True)
        return {"cautious_wd": True} if apart.random() < 0.3 and has_it else {}

    def averages(self, case: Case) -> dict[str, Any]:
        apart = random.Random(f"averages {self.seed}")
        if apart.random() > 1 / 3:
            return {}
        rounded = case.precision.endswith("stochastic") and apart.random() < 0.5
        return {"ema_decay": 0.75} | ({"ema_dtype": "bfloat16"} if rounded else {})

    def small_state(self, case: Case) -> dict[str, Any]:
        apart = random.Random(f"small state {self.seed}")
        if "8bit" not in case.precision or apart.random() < 0.5:
            return {}
        return {"fp32_state_below": apart.choice((8, 64, 300, 1 << 20))}

    # -- ranks that disagree ----------------------------------------------------------------------

    def disagreement(self) -> Case:
        pick = self.chance
        fsdp = self.chance.often(0.4)
        ranks = pick.randint(2, 4)
        if fsdp:
            mesh = (
                (("dp", ranks),)
                if self.chance.often(0.7)
                else (("dp_replicate", 2), ("dp_shard", 2))
            )
            layout = Layout("fsdp", mesh)
        else:
            layout = Layout(
                "copies", (("dp", ranks),), settings=self.layouts.copies_settings("adam", False)
            )
        built = self.chance.often(0.3) if not fsdp else self.chance.often(0.6)
        what = pick.choice(
            ("clip_grad", "lr when built")
            if built
            else ("lr",)
            if fsdp
            else ("lr", "zero_grad", "zero_grad", "freeze", "freeze")
        )
        odd = Disagreement(what, pick.randrange(layout.ranks), -1 if built else pick.randint(1, 2))
        apart = random.Random(f"disagreement {self.seed}")
        if apart.random() < 0.5:  # so that nothing else of a case depends on it
            what = apart.choice(("factors", "clip_grad later", "zeros later", *OTHER_SETTINGS))
            is_later = what == "factors" or what.endswith("later")
            odd = Disagreement(what, odd.rank, 2 if is_later else -1)
        layers = tuple(
            self.model.layer(f"blocks.{index}", "bf16") for index in range(pick.randint(1, 3))
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
            scaled=(odd.step,) if odd.what == "factors" else (),
            disagreement=odd,
        )


def _ahead_on_ranks(case: Case) -> bool:
    """Whether ranks step during backward, or in windows."""
    return any(
        each.kind != "alone" and (each.mode == "speculative" or each.place != "host")
        for each in case.layouts
    )
