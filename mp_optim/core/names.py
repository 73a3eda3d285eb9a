"""Canonical names: a parameter's FQN without what wrappers of modules add to it.

The rule is that of torch's ``get_state_dict``: a wrapper's attribute is left out where a module of
that wrapper's class stands, so that a submodule of the model's own that is called ``module`` stays.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
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
"""Wrappers, and the attribute in which they hold what they wrap. By name: none of them has to be
installed."""
_NEVER_REAL = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts of a name that only wrappers put there, whatever the module."""


@cache
def _attribute(kind: Any) -> str | None:
    """Where a class of modules holds what it wraps, if it is a wrapper's."""
    classes = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_HELD_IN[name] for name in classes if name in _HELD_IN), None)


def _wrapped(module: nn.Module | None) -> tuple[str, nn.Module] | None:
    """What a wrapper wraps, and the attribute that holds it; None of any other module."""
    kind: Any = type(module)
    if module is None or (attribute := _attribute(kind)) is None:
        return None
    held = module._modules.get(attribute)
    return None if held is None else (attribute, held)


def canonical_name(module: nn.Module, name: str) -> str:
    """A parameter's or buffer's name in a module (or in its state dict), without wrappers'
    attributes."""
    kept: list[str] = []
    current: nn.Module | None = module
    for part in name.split("."):
        while (
            (inner := _wrapped(current)) is not None
            and part != inner[0]
            and not _has(current, part)
        ):
            current = inner[1]  # a wrapper that leaves itself out of its state dict
        if inner is not None and part == inner[0]:
            current = inner[1]
            continue
        current = None if current is None else current._modules.get(part)
        if part not in _NEVER_REAL:
            kept.append(part)
    return ".".join(kept)


def _has(module: nn.Module | None, part: str) -> bool:
    if module is None:
        return False
    return part in {*module._modules, *module._parameters, *module._buffers}


def canonical_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names in a module, and what they are canonically; those that would become one stay as they
    are."""
    renamed = {name: canonical_name(module, name) for name in names}
    counts = Counter(renamed.values())
    twice = [name for name, short in renamed.items() if counts[short] > 1]
    return {**renamed, **{name: name for name in twice}}


def prefixed(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Model chunks with what names in them begin with: nothing, or their index if there are
    several."""
    if len(chunks) == 1:
        return [("", chunks[0])]
    return [(f"{index}.", chunk) for index, chunk in enumerate(chunks)]


def named_params(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of some chunks once, under its canonical name."""
    seen: set[int] = set()
    for prefix, chunk in prefixed(chunks):
        named = dict(chunk.named_parameters())
        short = canonical_names(chunk, named)
        for name, param in named.items():
            if id(param) not in seen:
                seen.add(id(param))
                yield prefix + short[name], param


def bare_name(name: str) -> str:
    """Return a name without the parts that only wrappers put there, whatever the module."""
    return _without(name, _NEVER_REAL) if any(map(name.__contains__, _NEVER_REAL)) else name


def matched_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Return, for each saved name, the wanted name of the same parameter, however the model was
    wrapped on either side.

    Equal names match first. The rest match if they are equal without :func:`bare_name`'s parts,
    then without a ``module.`` in front of all names of one side, then without any ``module`` part;
    always one name to one. A name without a match is returned bare.
    """
    sides = list(dict.fromkeys(saved)), list(dict.fromkeys(wanted))
    result: dict[str, str] = {}
    for form_of in (list, _bare, _unprefixed, without_wrappers):
        left, free = (dict(zip(side, form_of(side), strict=True)) for side in sides)
        for name, other in result.items():
            del left[name], free[other]
        if not left or not free:
            break
        once = _only_once(free)
        result |= {name: once[form] for form, name in _only_once(left).items() if form in once}
    return {name: result.get(name, bare_name(name)) for name in sides[0]}


def _bare(names: Sequence[str]) -> list[str]:
    return [*map(bare_name, names)]


def _unprefixed(names: Sequence[str]) -> list[str]:
    bare = _bare(names)
    is_wrapped = all(name.startswith("module.") for name in bare)
    return [name.removeprefix("module.") if is_wrapped else name for name in bare]


def without_wrappers(names: Iterable[str]) -> list[str]:
    """Return names without any part that wrappers put there, submodules called ``module``
    included."""
    return [_without(name, {*_NEVER_REAL, "module"}) for name in names]


def _only_once(forms: Mapping[str, str]) -> dict[str, str]:
    """Names by their forms, of forms that one name alone has."""
    counts = Counter(forms.values())
    return {form: name for name, form in forms.items() if counts[form] == 1}


def _without(name: str, parts: Collection[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in parts)


_SHOWN = 5


def names_in_words(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


_warned_of_untrained: weakref.WeakSet[Any] = weakref.WeakSet()


class ModelParams:
    """The model's parameters as they are when they are asked for; the model is not kept alive."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks = [weakref.ref(chunk) for chunk in chunks]

    def chunks(self) -> list[nn.Module]:
        """The model's chunks; none if one of them was deleted."""
        chunks = [chunk for ref in self._chunks if (chunk := ref()) is not None]
        return chunks if len(chunks) == len(self._chunks) else []

    def _named(self) -> list[tuple[str, Tensor]]:
        return list(named_params(self.chunks()))

    def names_of(self, params: Sequence[Tensor]) -> list[str | None]:
        """The canonical name of each parameter; None of one that is not in the model."""
        names = {id(param): name for name, param in self._named()}
        return [names.get(id(param)) for param in params]

    def untrained(
        self, param_groups: Sequence[Mapping[str, Any]], *, with_gradient: bool = False
    ) -> list[str]:
        """Return the names of trainable parameters that are in none of the groups.

        Args:
            with_gradient: only those that have a gradient now.
        """
        claimed = {id(param) for group in param_groups for param in group["params"]}
        return [
            name
            for name, param in self._named()
            if param.requires_grad
            and id(param) not in claimed
            and (param.grad is not None or not with_gradient)
        ]

    def warn_of_untrained(self, optimizer: Any, *, with_gradient: bool = False) -> None:
        """Warn, once for an optimizer, of trainable parameters that it does not have; not of a
        model of which it has none, such as a copy with averaged weights."""
        if optimizer in _warned_of_untrained:
            return
        names = self.untrained(optimizer.param_groups, with_gradient=with_gradient)
        trainable = sum(param.requires_grad for _, param in self._named())
        if not names or len(names) == trainable:
            return
        _warned_of_untrained.add(optimizer)
        warn(
            f"the optimizer does not train {len(names)} of the model's {trainable} trainable "
            f"parameters: {names_in_words(names)}. If they were added or replaced after "
            "the optimizer was built (a resized embedding, a new head), build it again; if they "
            "are not to be trained, call requires_grad_(False)"
        )
