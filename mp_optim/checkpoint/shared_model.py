"""What a checkpoint has to know of how ranks share a model out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mp_optim.checkpoint.common import without_state
from mp_optim.checkpoint.ranks import Ranks
from mp_optim.slots.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.slots.state_dict import CHECKSUMS


def parallel_of(
    optimizer: SlotKeyedOptimizer | None, given: ModelParallel | None, ranks: Ranks
) -> ModelParallel:
    """What an optimizer knows, or without one what is given, as far as it is between these ranks.

    Raises:
        ValueError: both are there.
    """
    if optimizer is None:
        return (given or ModelParallel()).among(ranks.members())
    if given is not None:
        raise ValueError(
            "model_parallel= beside an optimizer: it knows (optimizer.model_parallel), from the "
            "process_groups= and global_names= that get_megatron_optimizer was given"
        )
    return optimizer.model_parallel.among(ranks.members())


def settings_of(
    optimizer: SlotKeyedOptimizer, parallel: ModelParallel
) -> dict[str, Any]:
    """An optimizer's state dict without state, and without checksums of what is a part here."""
    settings, names = optimizer.settings_dict(), optimizer.model_parallel.names
    here = names.groups_in(settings["param_groups"], optimizer.param_groups)
    groups = parallel.names.groups_out(here)
    plain = without_state({**settings, "param_groups": groups})
    return {
        **plain,
        "param_groups": without_checksums(plain["param_groups"], parallel),
    }


def without_checksums(
    groups: Iterable[Mapping[str, Any]], parallel: ModelParallel
) -> list[dict[str, Any]]:
    """Param groups without the checksums of parameters of which this rank has parts: a checksum is
    of the whole."""
    parts = {parallel.names[name] for name in parallel.partitions}
    return [_without_checksums(group, parts) for group in groups]


def _without_checksums(
    group: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    if CHECKSUMS not in group or not names:
        return dict(group)
    pairs = zip(group["param_names"], group[CHECKSUMS], strict=True)
    return {**group, CHECKSUMS: [None if name in names else one for name, one in pairs]}


def saved_elsewhere(parallel: ModelParallel, ranks: Ranks) -> set[str]:
    """Parameters here that are copies of what another of these ranks saves: tied embeddings, which
    ZeRO may cut in other places on another stage."""
    members = ranks.members()
    return {name for name, owner in parallel.copies.items() if owner in members}
