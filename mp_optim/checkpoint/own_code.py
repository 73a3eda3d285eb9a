"""What a load has to ask of the caller's own code: hooks, extra state of modules, schedulers. They
may refuse, which is known only by doing, so what they hold is kept first, to be put back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from mp_optim.checkpoint.entries import MODEL, Models, chunks_of, load_model, plain_of
from mp_optim.checkpoint.flat import FlatShard
from mp_optim.checkpoint.partitioned import PartitionShard
from mp_optim.slots import local_tensor
from mp_optim.slots.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.slots.model_parallel import ModelParallel

_EXTRA_STATE = "_extra_state"
"""What torch calls, in a module's state dict, the value of its ``get_extra_state``."""


def is_extra_state(entry: str) -> bool:
    """Whether an entry is a tensor that a module's ``get_extra_state`` returned."""
    return entry.startswith(MODEL) and entry.rpartition(".")[2] == _EXTRA_STATE


def has_own_hooks(models: Models, optimizer: SlotKeyedOptimizer | None) -> bool:
    """Whether hooks for loading, of modules or of the optimizer, are not torch's own."""
    return any(
        _module_of(hook).partition(".")[0] != "torch"
        for hook in _hooks(models, optimizer)
    )


def _hooks(models: Models, optimizer: SlotKeyedOptimizer | None) -> Iterator[Any]:
    if optimizer is not None:
        yield from optimizer._optimizer_load_state_dict_pre_hooks.values()
        yield from optimizer._optimizer_load_state_dict_post_hooks.values()
    for module in itertools.chain(*(chunk.modules() for _, chunk in chunks_of(models))):
        yield from module._load_state_dict_pre_hooks.values()
        yield from module._load_state_dict_post_hooks.values()


def _module_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


def kept_model(
    models: Models,
    tensors: Mapping[str, Tensor],
    parallel: ModelParallel,
    *,
    values: bool,
) -> Callable[[], None]:
    """Keep the extra state of a model; returns what puts it back.

    Args:
        tensors: of :func:`mp_optim.checkpoint.entries.entries_of`.
        values: keep what is in the tensors, too, on the host.
    """
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    plain = deepcopy(plain_of(models, parallel))
    copies = {
        name: _memory(tensor).to("cpu", copy=True)
        for name, tensor in own.items()
        if values or is_extra_state(name)
    }

    @torch.no_grad()
    def put_back() -> None:
        for name, copied in copies.items():
            _memory(own[name]).copy_(copied)
        load_model(models, own, plain, parallel)

    return put_back


def _memory(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    if isinstance(tensor, PartitionShard):
        return _memory(tensor.held)
    return tensor.local if isinstance(tensor, FlatShard) else local_tensor(tensor)


def kept_scheduler(scheduler: Any) -> Callable[[], None]:
    """Keep a scheduler's state; returns what puts it back."""
    state, names = deepcopy(scheduler.state_dict()), {*_attributes(scheduler)}

    def put_back() -> None:
        scheduler.load_state_dict(deepcopy(state))
        for name in {*_attributes(scheduler)} - names:
            delattr(scheduler, name)

    return put_back


def _attributes(scheduler: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(scheduler, "__dict__", {})
    return found
