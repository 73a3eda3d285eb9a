"""What parameters are called in the whole model, where ranks count from 0 what they have of it.

Pipeline stages count their layers and expert-parallel ranks their experts from 0, so that one name
stands for different parameters. Here are pure functions of names and numbers; who tells them is in
:mod:`mp_optim.slots.model_parallel`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mp_optim.slots.state_dict import names_in_words

_LAYER = re.compile(r"^((?:.*?\.)?layers)\.(\d+)(?=\.|$)")
_EXPERTS = (
    re.compile(r"^(.*\blocal_experts\.)(\d+)(?=\.)"),
    re.compile(r"^(.*\bexperts\.linear_fc[12]\.(?:weight|bias))(\d+)$"),
)
"""Experts as Megatron names them: a list of modules, or one module with a weight for each."""


class Layer(NamedTuple):
    """A layer of a pipeline stage.

    Attributes:
        path: of the list that it is in. position: there.
        number: its index in the whole model, if it says so itself.
    """

    path: str
    position: int
    number: int | None = None


Chunks = Sequence[Sequence[Layer]]
"""The layers of a stage, chunk by chunk."""


def layer_of(name: str) -> tuple[str, int] | None:
    """The list of layers that a name leads through first, and the index in it."""
    found = _LAYER.match(name)
    return None if found is None else (found[1], int(found[2]))


def layer_indices(stages: Sequence[Chunks]) -> list[list[dict[tuple[str, int], int]]]:
    """Where each layer is in the whole model: for each stage and chunk, by path and position.

    As the layers say themselves, if all of a list do and no two say the same. Where the positions
    already differ they stay. Otherwise layers follow each other: the first chunks of all stages,
    then the second ones.
    """
    placed: list[list[dict[tuple[str, int], int]]] = [
        [{} for _ in chunks] for chunks in stages
    ]
    order = list(_in_order(stages))
    everything = [layer for stage, chunk in order for layer in stages[stage][chunk]]
    for path in dict.fromkeys(layer.path for layer in everything):
        index = _index([layer for layer in everything if layer.path == path])
        first = 0
        for stage, chunk in order:
            here = [layer for layer in stages[stage][chunk] if layer.path == path]
            for layer in here:
                placed[stage][chunk][path, layer.position] = index(layer, first)
            first += max((layer.position + 1 for layer in here), default=0)
    return placed


def _in_order(stages: Sequence[Chunks]) -> Iterator[tuple[int, int]]:
    """Stage and chunk, in the order in which forward goes through them."""
    for chunk in range(max(map(len, stages), default=0)):
        for stage, chunks in enumerate(stages):
            if chunk < len(chunks):
                yield stage, chunk


def _index(layers: Sequence[Layer]) -> Callable[[Layer, int], int]:
    """A layer's index in the whole model, given how many come before its chunk.

    Args:
        layers: of all stages, of one list.
    """
    numbers = [layer.number for layer in layers]
    if None not in numbers and len(set(numbers)) == len(numbers):
        return lambda layer, _: layer.position if layer.number is None else layer.number
    if len({layer.position for layer in layers}) == len(layers):
        return lambda layer, _: layer.position
    return lambda layer, first: first + layer.position


def expert_counts(names: Iterable[str]) -> dict[str, int]:
    """How many experts are counted from 0 under each path; those that are counted otherwise are
    left out."""
    indices: dict[str, set[int]] = {}
    for name in names:
        for pattern in _EXPERTS:
            if found := pattern.match(name):
                indices.setdefault(found[1], set()).add(int(found[2]))
    return {
        path: len(each)
        for path, each in indices.items()
        if each == set(range(len(each)))
    }


@dataclass(frozen=True)
class Numbering:
    """A function of names: what each is called in the whole model.

    Attributes:
        layers: by path and index here, the path and index there. Paths begin with the chunk's
            index, if there are several chunks.
        prefixes: of chunks, that names in the whole model have not.
        first_experts: the number of this rank's first expert, by path as it is here.
    """

    layers: Mapping[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    first_experts: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        for pattern in _EXPERTS:
            found = pattern.match(name)
            if found is not None and found[1] in self.first_experts:
                number = self.first_experts[found[1]] + int(found[2])
                name = f"{found[1]}{number}{name[found.end() :]}"
        layer = layer_of(name)
        if layer is not None and layer in self.layers:
            path, index = self.layers[layer]
            return f"{path}.{index}{name.removeprefix(f'{layer[0]}.{layer[1]}')}"
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name.removeprefix(prefix)
        return name


class GlobalNames:
    """The names of one rank's parameters and buffers, and what they are called in the whole model.

    Args:
        name_of: says so; by default they are called the same.
        known: the names here. Those that would become one stay as they are.
    """

    def __init__(
        self,
        name_of: Callable[[str], str] = str,
        known: Iterable[str] = (),
    ) -> None:
        self._name_of = name_of
        names = {name: name_of(name) for name in known}
        counts = Counter(names.values())
        self.twice = [name for name, whole in names.items() if counts[whole] > 1]
        self._known = {**names, **{name: name for name in self.twice}}
        self._local = {whole: name for name, whole in self._known.items()}

    def __getitem__(self, name: str) -> str:
        """A name in the whole model, from the one here."""
        whole = self._known.get(name)
        return self._name_of(name) if whole is None else whole

    def check(self) -> None:
        """Raise ValueError, with the names, if two would become one."""
        if self.twice:
            raise ValueError(
                f"global_names makes one name of {names_in_words(self.twice)}: every parameter and "
                "buffer of a rank needs one of its own"
            )

    def groups_out(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Param groups that leave, with the whole model's names."""
        return [self._renamed(group, self.__getitem__) for group in groups]

    def groups_in(
        self, groups: Sequence[dict[str, Any]], live: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Saved param groups with the names that live ones have, if they have the whole model's;
        else as they are: state that was saved, or put together, with the names here."""
        saved, here = _names(groups), _names(live)
        if saved == here or not saved <= self._local.keys():
            return list(groups)
        return [self._renamed(group, self._local.__getitem__) for group in groups]

    @staticmethod
    def _renamed(
        group: dict[str, Any], name_of: Callable[[str], str]
    ) -> dict[str, Any]:
        if "param_names" not in group:
            return group
        return {**group, "param_names": [*map(name_of, group["param_names"])]}


def _names(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in group.get("param_names", ())}
