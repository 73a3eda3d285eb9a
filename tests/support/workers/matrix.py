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
STEPS, MORE = range(3), range(3, 8)


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {
            key: value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
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
    full = {
        name: whole(value, group) for name, value in state_of(model, optimizer).items()
    }
    if rank == 0:
        torch.save(full, f"{folder}/{layout.name}.pt")


def load(
    saved: Layout,
    layout: Layout,
    folder: str,
    group: Any,
    settings: list[dict[str, Any]],
    uninterrupted: dict[str, Tensor],
) -> list[str]:
    """What is wrong after a load, and after five more steps."""
    model, optimizer = layout.build(seed=2)
    convert = layout.form != "float32" and saved.name != layout.name
    extra = checkpoint.load(
        f"{folder}/{saved.name}", model, optimizer, convert=convert, process_group=group
    )
    wrong = [] if extra == {"from": saved.name} else [f"extra {extra}"]
    expected = put(layout, torch.load(f"{folder}/{saved.name}.pt"), settings, seed=3)
    wrong += [
        f"loaded: {name}"
        for name in different(state_of(model, optimizer), state_of(*expected))
    ]
    train(model, optimizer, MORE)
    train(*expected, MORE)
    wrong += [
        f"after: {name}"
        for name in different(state_of(model, optimizer), state_of(*expected))
    ]
    if saved.form == layout.form == "float32":
        plain = put(layout, uninterrupted, settings, seed=4)
        wrong += [
            f"uninterrupted: {name}"
            for name in different(state_of(model, optimizer), state_of(*plain))
        ]
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
    wrong, pairs = {}, 0
    for saved, layout in itertools.product(known, known):
        if rank < layout.ranks:
            pairs += 1
            if found := load(
                saved, layout, folder, groups[layout.ranks], settings, uninterrupted
            ):
                wrong[f"{saved.name} -> {layout.name}"] = found
    with open(f"{folder}/rank{rank}.json", "w", encoding="utf-8") as file:
        json.dump({"wrong": wrong, "pairs": pairs, "layouts": len(known)}, file)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    main(sys.argv[1])
