"""Four gloo processes: every layout saves, every layout loads, and goes on as if nothing had
happened."""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mp_optim import checkpoint
from support.layouts import Layout, layouts, local, put, state_of, train, whole

warnings.filterwarnings("ignore")
STEPS, MORE = range(3), range(3, 6)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [
        name
        for name, value in expected.items()
        if not torch.equal(local(found[name]), local(value))
    ]


def save(
    layout: Layout,
    folder: str,
    rank: int,
    group: Any,
    start: dict[str, Tensor],
    settings: list[dict[str, Any]],
) -> None:
    """Save a layout that holds a state of its own form, and that state as whole tensors beside
    it."""
    model, optimizer = put(layout, start, settings, seed=1)
    train(model, optimizer, STEPS)
    checkpoint.save(
        f"{folder}/{layout.name}",
        model,
        optimizer,
        extra={"from": layout.name},
        process_group=group,
    )
    full = {name: whole(value, group) for name, value in state_of(model, optimizer).items()}
    if rank == 0:
        torch.save(full, f"{folder}/{layout.name}.pt")


class Expected:
    """What layouts hold that take a saved state as whole tensors. Found once for states of the same
    bits: most layouts save those.

    Args:
        known: the layouts that were saved in the folder.
    """

    def __init__(self, known: list[Layout], folder: str, settings: list[dict[str, Any]]) -> None:
        self._settings = settings
        self._states: list[dict[str, Tensor]] = []
        self._number = {
            layout.name: self._number_of(torch.load(f"{folder}/{layout.name}.pt"))
            for layout in known
        }
        self._found: dict[tuple[int, str], tuple[dict[str, Tensor], dict[str, Tensor]]] = {}

    def _number_of(self, state: dict[str, Tensor]) -> int:
        for number, other in enumerate(self._states):
            if state.keys() == other.keys() and all(
                same_bits(value, other[name]) for name, value in state.items()
            ):
                return number
        self._states.append(state)
        return len(self._states) - 1

    def states(self, saved: Layout, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A layout's state after it took what another one saved, and after the steps that
        follow."""
        key = self._number[saved.name], layout.name
        if key not in self._found:
            state = self._states[key[0]]
            model, optimizer = put(layout, state, self._settings, seed=3)
            loaded = copies(state_of(model, optimizer))
            train(model, optimizer, MORE)
            self._found[key] = loaded, copies(state_of(model, optimizer))
        return self._found[key]


def same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = one.reshape(-1), other.reshape(-1)
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))


def copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of a state, as it is now."""
    return {name: local(value).clone() for name, value in state.items()}


def load(
    saved: Layout,
    layout: Layout,
    folder: str,
    group: Any,
    expected: Expected,
    uninterrupted: dict[str, Tensor],
) -> list[str]:
    """What is wrong after a load, and after the steps that follow.

    Args:
        uninterrupted: the layout's state if training had gone on.
    """
    model, optimizer = layout.build(seed=2)
    convert = layout.form != "float32" and saved.name != layout.name
    extra = checkpoint.load(
        f"{folder}/{saved.name}", model, optimizer, convert=convert, process_group=group
    )
    wrong = [] if extra == {"from": saved.name} else [f"extra {extra}"]
    loaded, after = expected.states(saved, layout)
    found = state_of(model, optimizer)
    wrong += [f"loaded: {name}" for name in different(found, loaded)]
    train(model, optimizer, MORE)
    found = state_of(model, optimizer)
    wrong += [f"after: {name}" for name in different(found, after)]
    if saved.form == layout.form == "float32":
        missed = different(found, uninterrupted)
        wrong += [f"uninterrupted: {name}" for name in missed]
    return wrong


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {size: dist.new_group(list(range(size))) for size in range(1, 5)}
    known = layouts()
    first = known[0].build(seed=1)
    settings, start = (
        settings_of(first[1]),
        {name: whole(value, None) for name, value in state_of(*first).items()},
    )
    train(*first, range(MORE.stop))
    uninterrupted = state_of(*first)
    for layout in known:
        if rank < layout.ranks:
            save(layout, folder, rank, groups[layout.ranks], start, settings)
    dist.barrier()
    expected = Expected(known, folder, settings)
    through = {
        layout.name: copies(state_of(*put(layout, uninterrupted, settings, seed=4)))
        for layout in known
        if rank < layout.ranks
    }
    wrong, pairs = {}, 0
    for saved, layout in itertools.product(known, known):
        if rank < layout.ranks:
            pairs += 1
            if found := load(
                saved, layout, folder, groups[layout.ranks], expected, through[layout.name]
            ):
                wrong[f"{saved.name} -> {layout.name}"] = found
    with open(f"{folder}/rank{rank}.json", "w", encoding="utf-8") as file:
        json.dump({"wrong": wrong, "pairs": pairs, "layouts": len(known)}, file)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(sys.argv[1])
