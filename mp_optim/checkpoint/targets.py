"""What a checkpoint is read into: the live tensors where nothing about them can be refused, and
else tensors of their own, which are looked at before any live one is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mp_optim.checkpoint.blocks import is_cut, scales_of_elements
from mp_optim.checkpoint.entries import MODEL, STATE, entry_name, key_and_fqn
from mp_optim.checkpoint.flat import FlatShard
from mp_optim.checkpoint.index import Saved
from mp_optim.checkpoint.own_code import is_extra_state
from mp_optim.checkpoint.partitioned import PartitionShard
from mp_optim.slots.keyed_optimizer import SlotKeyedOptimizer
from mp_optim.slots.model_parallel import ModelParallel
from mp_optim.slots.state_keys import AVERAGE, SCALE, STEP, is_scale, scale_key

_OTHER_FORMS = {"remainder": "master_param", "master_param": "remainder"}
"""Keys under which the same thing may have been saved."""


@dataclass(frozen=True)
class Targets:
    """Tensors by the names of the entries they are read from.

    Attributes:
        apart: with memory of their own: state that was saved in another form, or is converted when
            it is loaded, step numbers, and extra state of modules.
        live: those of the model and the optimizer.
    """

    apart: dict[str, Tensor] = field(default_factory=dict)
    live: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them."""
        return self.apart | self.live

    def to_check(self) -> dict[str, Tensor]:
        """As the optimizer takes them, what is apart, and zeros for what is live: that has the form
        of the tensors that are there, and its values were not read yet."""
        blank = _Blanks()
        blanks = {
            name: blank.like(value)
            for name, value in self.live.items()
            if name.startswith(STATE)
        }
        return as_read(self.apart | blanks)


def targets_of(
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Saved],
    copies: Collection[str],
    *,
    convert: bool,
) -> Targets:
    """What to read a checkpoint into.

    Args:
        tensors: of :func:`mp_optim.checkpoint.entries.entries_of`.
        saved: the checkpoint's entries.
        copies: of :func:`copies_of`.
        convert: read tensors of the model of another dtype, too.
    """
    targets = Targets()
    for name, value in tensors.items():
        key, fqn = key_and_fqn(name)
        differs = _differs(name, value, saved)
        if not name.startswith(STATE):
            is_apart = (differs and convert) or is_extra_state(name)
            where = targets.apart if is_apart else targets.live
            where[name] = _new_like(value, saved.get(name)) if is_apart else value
        elif is_scale(key) and _base_differs(key, fqn, tensors, saved):
            continue  # it comes with what it scales
        elif differs or key == STEP:
            targets.apart.update(_as_saved(name, value, saved))
        else:
            where = targets.apart if name in copies else targets.live
            where[name] = value
    return targets


def copies_of(
    optimizer: SlotKeyedOptimizer | None,
    parallel: ModelParallel,
    tensors: Collection[str],
) -> set[str]:
    """Names of entries that are FP32 copies of what is stored in blocks.

    Args:
        tensors: names of :func:`mp_optim.checkpoint.entries.entries_of`.
    """
    if optimizer is None:
        return set()
    copies = set()
    for slot in optimizer.slots():
        name = parallel.names[optimizer.slot_name(slot)]
        for key in optimizer.state_of(slot).in_blocks():
            if entry_name(scale_key(key), name) not in tensors:
                copies.add(entry_name(key, name))
    return copies


def as_read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Entries after reading, as the model and the optimizer take them, with the scales of a tensor
    of which this rank has a part cut to that part."""
    result = dict(tensors)
    for name, value in tensors.items():
        key, fqn = key_and_fqn(name)
        scale = entry_name(scale_key(key), fqn)
        if name.startswith(STATE) and is_cut(value) and scale in tensors:
            result[scale] = scales_of_elements(value, tensors[scale])
        if isinstance(value, PartitionShard):
            result[name] = value.local
    return result


def _differs(name: str, own: Tensor, saved: Mapping[str, Saved]) -> bool:
    """Whether this was saved in another dtype, or as something else."""
    if name not in saved:
        return not name.startswith(MODEL)
    return saved[name].dtype != own.dtype


def _base_differs(
    key: str, fqn: str, tensors: Mapping[str, Tensor], saved: Mapping[str, Saved]
) -> bool:
    """Whether what a scale belongs to was saved in another form."""
    base = entry_name(key.removesuffix(SCALE), fqn)
    return base in tensors and _differs(base, tensors[base], saved)


def _as_saved(name: str, own: Tensor, saved: Mapping[str, Saved]) -> dict[str, Tensor]:
    """New tensors to read one state tensor into, under the names and of the dtypes it was saved
    with."""
    key, fqn = key_and_fqn(name)
    if name not in saved:
        other = entry_name(_OTHER_FORMS.get(key, ""), fqn)
        if other in saved:
            return {other: _new_like(own, saved[other])}
        if is_scale(key) and entry_name(key.removesuffix(SCALE), fqn) in saved:
            return {}
        if key == AVERAGE:  # it starts from the main param
            return {}
    form = {name: _new_like(own, saved.get(name))}
    scale = entry_name(scale_key(key), fqn)
    if scale in saved and saved[name].dtype != own.dtype:
        form[scale] = _new(saved[scale])
    return form


def _new(saved: Saved) -> Tensor:
    return torch.empty(saved.shape, dtype=saved.dtype, device="cpu")


def _new_like(own: Tensor, saved: Saved | None) -> Tensor:
    """A tensor to read an entry into, of the layout of ``own`` and the dtype that was saved."""
    dtype = own.dtype if saved is None else saved.dtype
    if isinstance(own, PartitionShard):
        return own.with_held(torch.empty_like(own.held, dtype=dtype))
    return torch.empty_like(own, dtype=dtype)


class _Blanks:
    """Zeros of the form of other tensors, which share their memory."""

    def __init__(self) -> None:
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, own: Tensor) -> Tensor:
        """For a tensor of any layout."""
        if isinstance(own, PartitionShard):
            return own.with_held(self.like(own.held))
        if isinstance(own, FlatShard):
            return FlatShard(self.like(own.local), own.shape, own.start)
        if isinstance(own, DTensor):
            return DTensor.from_local(
                self.like(own.to_local().detach()),
                own.device_mesh,
                own.placements,
                run_check=False,
                shape=own.shape,
                stride=own.stride(),
            )
        return self._first(own.numel(), own.dtype, own.device).view(own.shape)

    def _first(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        known = self._zeros.get((dtype, device))
        if known is None or known.numel() < count:
            room = max(count, 0 if known is None else 2 * known.numel())
            known = torch.zeros(room, dtype=dtype, device=device)
            self._zeros[dtype, device] = known
        return known[:count]
