"""Canonical names: a parameter's FQN without what wrappers of modules add to it.

The rule is that of torch's ``get_state_dict``: a wrapper's attribute is left out where a module of
that wrapper's class stands, so that a submodule of the model's own that is called ``module`` stays.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

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


def matched_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """For names saved by whatever version, of a model wrapped in whatever way: those of them that
    are wanted now.

    A name that matches nothing is its own match, without the parts that only wrappers put there.
    """
    known, stripped = set(wanted), {name: _without(name, _NEVER_REAL) for name in saved}
    bare: dict[str, list[str]] = {}
    for name in known - set(stripped.values()):
        bare.setdefault(_without(name, {"module"}), []).append(name)
    everything_wrapped = all(name.startswith("module.") for name in stripped.values())
    result = {}
    for name, short in stripped.items():
        candidates = bare.get(_without(short, {"module"}), [])
        if short not in known and len(candidates) == 1:
            short = candidates[0]
        elif (
            short not in known
            and everything_wrapped
            and not all(name.startswith("module.") for name in known)
        ):
            short = short.removeprefix("module.")
        result[name] = short
    return result


def _without(name: str, parts: set[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in parts)


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

    def untrained(self, param_groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Names of trainable parameters that are in none of the groups."""
        claimed = {id(param) for group in param_groups for param in group["params"]}
        trained = [(name, param) for name, param in self._named() if param.requires_grad]
        return [name for name, param in trained if id(param) not in claimed]
