"""Canonical names: the FQNs of parameters without the parts that module wrappers add.

The module decides, as in torch's ``get_state_dict``: a wrapper's attribute is removed from a name
only if the module that has the attribute is an instance of the wrapper's class. So a submodule of
the model that is named ``module`` keeps its name.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import methodcaller
from typing import Any

from torch import Tensor, nn

from mp_optim.host.calls import warn

_CHECKPOINTING = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_HELD_IN = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    f"{_CHECKPOINTING}.ActivationWrapper": "_checkpoint_wrapped_module",
    f"{_FSDP}.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
    "megatron.core.distributed.data_parallel_base._BaseDataParallel": "module",
    "megatron.core.transformer.module.Float16Module": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}
"""The attribute that holds the wrapped module, by class name of the wrapper. Class names need no
import, so no wrapper has to be installed."""
_NEVER_REAL = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of a name that only wrappers add."""


@cache
def _attribute(kind: Any) -> str | None:
    """Return the name of the attribute in which a wrapper class stores its wrapped module; None for
    other classes."""
    classes = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_HELD_IN[name] for name in classes if name in _HELD_IN), None)


def _wrapped(module: nn.Module | None) -> tuple[str, nn.Module] | None:
    """Return a wrapper's attribute and the wrapped module; None for other modules."""
    kind: Any = type(module)
    if module is None or (attribute := _attribute(kind)) is None:
        return None
    held = module._modules.get(attribute)
    return None if held is None else (attribute, held)


def canonical_name(module: nn.Module, name: str) -> str:
    """Return a parameter's or buffer's name without wrappers' attributes.

    Args:
        module: the module, which may be wrapped.
        name: name in the module or in its state dict.
    """
    kept: list[str] = []
    current: nn.Module | None = module
    for part in name.split("."):
        inner = _wrapped(current)
        while (
            current is not None
            and inner is not None
            and part not in {inner[0], *current._modules, *current._parameters, *current._buffers}
        ):
            # Keys of a state dict may lack the wrapper's attribute, so continue in the wrapped
            # module.
            current = inner[1]
            inner = _wrapped(current)
        if inner is not None and part == inner[0]:
            current = inner[1]
            continue
        current = None if current is None else current._modules.get(part)
        if part not in _NEVER_REAL:
            kept.append(part)
    return ".".join(kept)


def canonical_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the canonical name of each name in a module. If two names would become equal, both
    stay unchanged."""
    renamed = {name: canonical_name(module, name) for name in names}
    counts = Counter(renamed.values())
    twice = [name for name, short in renamed.items() if counts[short] > 1]
    return {**renamed, **{name: name for name in twice}}


def prefixed(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return each model chunk with the prefix of its names: the chunk's index and a dot, or "" for
    a single chunk."""
    if len(chunks) == 1:
        return [("", chunks[0])]
    return [(f"{index}.", chunk) for index, chunk in enumerate(chunks)]


def canonical_items(
    chunks: Sequence[nn.Module],
    read: Callable[[nn.Module], Mapping[str, Any] | Iterable[tuple[str, Any]]],
) -> Iterator[tuple[str, Any]]:
    """Yield values of a model's chunks with their canonical names and the chunks' prefixes.

    Args:
        chunks: the chunks.
        read: function that returns names and values of a chunk. ``nn.Module.state_dict`` ignores a
            method of the user's class, which may leave values out; ``methodcaller`` calls it.
    """
    for prefix, chunk in prefixed(chunks):
        own = dict(read(chunk))
        for name, short in canonical_names(chunk, own).items():
            yield prefix + short, own[name]


def named_params(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of some chunks once, with its canonical name and the chunk's prefix."""
    seen: set[int] = set()
    for name, param in canonical_items(chunks, methodcaller("named_parameters")):
        if id(param) not in seen:
            seen.add(id(param))
            yield name, param


def bare_name(name: str) -> str:
    """Return a name without the parts that only wrappers add, without looking at a module."""
    if not any(map(name.__contains__, _NEVER_REAL)):
        return name
    return ".".join(part for part in name.split(".") if part not in _NEVER_REAL)


def matched_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Map each saved name to this model's name of the same parameter, even if the model was wrapped
    in another way at the save.

    Names are compared in four rounds. In each round, two names match if their shortened names are
    equal, and no other name of either side has this shortened name:

    1. names as they are
    2. names without wrappers' parts (:func:`bare_name`)
    3. names that are also without a ``module.`` that all names of one side start with
    4. names that are also without any ``module`` part

    A saved name without a match is mapped to the name without wrappers' parts.

    Args:
        saved: names in the saved state.
        wanted: names in this model.
    """
    sides = list(dict.fromkeys(saved)), list(dict.fromkeys(wanted))
    result: dict[str, str] = {}
    for forms in zip(*map(_shortened, sides), strict=True):
        left, free = (dict(zip(*pair, strict=True)) for pair in zip(sides, forms, strict=True))
        for name, other in result.items():
            del left[name], free[other]
        if not left or not free:
            break
        once = _only_once(free)
        result |= {name: once[form] for form, name in _only_once(left).items() if form in once}
    return {name: result.get(name, bare_name(name)) for name in sides[0]}


def _shortened(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the shortened names of each round of :func:`matched_names`."""
    yield names
    bare = list(map(bare_name, names))
    yield bare
    is_wrapped = all(name.startswith("module.") for name in bare)
    yield [name.removeprefix("module.") if is_wrapped else name for name in bare]
    yield without_wrappers(names)


def without_wrappers(names: Iterable[str]) -> list[str]:
    """Return names without all parts that wrappers may add. Parts named ``module`` are removed,
    too, even if the model has a submodule of that name."""
    return [
        ".".join(part for part in bare_name(name).split(".") if part != "module") for name in names
    ]


def _only_once(forms: Mapping[str, str]) -> dict[str, str]:
    """Return the full name for each shortened name, except shortened names that several full names
    have.

    Args:
        forms: shortened name of each full name.
    """
    counts = Counter(forms.values())
    return {form: name for name, form in forms.items() if counts[form] == 1}


_SHOWN = 5


def names_in_words(names: Sequence[str]) -> str:
    """Return the first five names and the number of remaining names, for messages."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


_warned_of_untrained: weakref.WeakSet[Any] = weakref.WeakSet()


class ModelParams:
    """The current parameters of a model. The model may be freed while this object exists."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = [weakref.ref(chunk) for chunk in chunks]

    def chunks(self) -> list[nn.Module]:
        """Return the model's chunks, or an empty list if any chunk was deleted."""
        chunks = [chunk for ref in self._chunks if (chunk := ref()) is not None]
        return chunks if len(chunks) == len(self._chunks) else []

    def names_of(self, params: Sequence[Tensor]) -> list[str | None]:
        """Return the canonical name of each parameter; None for a parameter that is not in the
        model."""
        names = {id(param): name for name, param in named_params(self.chunks())}
        return [names.get(id(param)) for param in params]

    def untrained(
        self, param_groups: Sequence[Mapping[str, Any]], *, with_gradient: bool = False
    ) -> list[str]:
        """Return the names of trainable parameters that are in no param group.

        Args:
            param_groups: the optimizer's groups.
            with_gradient: True for only parameters that have a gradient now.
        """
        claimed = {id(param) for group in param_groups for param in group["params"]}
        return [
            name
            for name, param in named_params(self.chunks())
            if param.requires_grad
            and id(param) not in claimed
            and (param.grad is not None or not with_gradient)
        ]

    def warn_of_untrained(self, optimizer: Any, *, with_gradient: bool = False) -> None:
        """Warn of trainable parameters that an optimizer does not have, once for each optimizer.

        If the optimizer has none of the model's parameters, there is no warning, because the model
        may be a copy with averaged weights.

        Args:
            optimizer: the optimizer to check.
            with_gradient: True for only parameters that have a gradient now.
        """
        if optimizer in _warned_of_untrained:
            return
        names = self.untrained(optimizer.param_groups, with_gradient=with_gradient)
        trainable = sum(param.requires_grad for _, param in named_params(self.chunks()))
        if not names or len(names) == trainable:
            return
        _warned_of_untrained.add(optimizer)
        warn(
            f"the optimizer does not train {len(names)} of the model's {trainable} trainable "
            f"parameters: {names_in_words(names)}. If these parameters were added or replaced "
            "after the optimizer was built (a resized embedding, a new head), build the "
            "optimizer again; to freeze parameters, call requires_grad_(False)"
        )
