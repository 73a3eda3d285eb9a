"""The model of a drawn case, and which layers are used when."""

from __future__ import annotations

import dataclasses
import random

from lab.layout_fuzz.case import Layer, Layout, Param

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


class Chance(random.Random):
    """The random numbers of a case, in one order."""

    def often(self, share: float) -> bool:
        """True in this share of the calls."""
        return self.random() < share


class DrawnModel:
    """Layers of one case.

    Attributes:
        empty: some parameters have no elements.
    """

    def __init__(self, chance: Chance) -> None:
        self.chance, self.empty = chance, False

    def layers(self, layouts: tuple[Layout, ...], rule: str, precision: str) -> tuple[Layer, ...]:
        ep = max(layout.size("ep") for layout in layouts)
        fsdp = any(layout.kind == "fsdp" for layout in layouts)
        self.empty = not fsdp  # torch: "_chunk_cat expects non-empty tensor"
        experts = (
            0
            if ep == 1 and self.chance.often(0.4)
            else self.chance.choice((1, 2, 4)) * (1 if ep == 1 else ep)
        )
        found = [
            self.layer(f"blocks.{index}", precision) for index in range(self.chance.randint(1, 4))
        ]
        found += [
            self.layer(f"experts.{index}", precision, depth=ep if fsdp and ep > 1 else 0)
            for index in range(experts)
        ]
        plain = all(layout.kind == "copies" for layout in layouts)
        if (
            self.chance.often(0.2)
            and not fsdp
            and len(found) > 1
            and not any(layout.size(axis) > 1 for layout in layouts for axis in ("ep", "pp"))
        ):
            found = self.tied(found)
        streams = streams_of(layouts)
        return tuple(self.skipping(layer, streams, plain) for layer in found)

    def layer(self, name: str, precision: str, depth: int = 0) -> Layer:
        params = []
        for index in range(self.chance.randint(1, 3)):
            shape = self.chance.choice(_SHAPES)
            if self.empty and self.chance.often(0.06):
                shape = (0, 8)
            if depth:  # experts in one tensor, so that they can be split
                shape = (depth * self.chance.choice((1, 2)), self.chance.choice((4, 5, 6)), 6)
            splits = self.chance.randrange(len(shape)) if self.chance.often(0.7) else None
            params.append(Param("wbc"[index], shape, frozen=self.chance.often(0.06), splits=splits))
        if all(param.frozen for param in params):
            params[0] = dataclasses.replace(params[0], frozen=False)
        return Layer(name, tuple(params), fp32=precision != "fp32" and self.chance.often(0.2))

    def tied(self, found: list[Layer]) -> list[Layer]:
        dense = [layer for layer in found if not layer.is_expert]
        first, last = dense[0], dense[-1]
        if first is last or first.params[0].frozen or first.fp32 != last.fp32:
            return found
        return [
            dataclasses.replace(layer, tied_to=first.name) if layer is last else layer
            for layer in found
        ]

    def skipping(self, layer: Layer, streams: int, plain: bool) -> Layer:
        if not self.chance.often(0.6 if layer.is_expert else 0.1):
            return layer
        skips = []
        for _ in range(self.chance.randint(1, 3)):
            count = self.chance.randint(
                0, streams if plain and self.chance.often(0.2) else streams - 1
            )
            skips.append(tuple(sorted(self.chance.sample(range(streams), count))))
        return dataclasses.replace(layer, skips=tuple(skips))


def streams_of(layouts: tuple[Layout, ...]) -> int:
    most = max(layout.data_ranks for layout in layouts)
    return max(2, most) if most <= 4 else most
