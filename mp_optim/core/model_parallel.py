"""The part of a model that one rank has: the names of its parameters in the whole model, and their
tensor-parallel splits."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.core.names import canonical_items, canonical_name, names_in_words, prefixed
from mp_optim.core.param_attributes import (
    is_expert_param,
    is_tensor_parallel,
    partition_dim,
    partition_form,
)
from mp_optim.core.partition import Partition, partition
from mp_optim.host.torch_types import is_dtensor
from mp_optim.process_groups.missing_ranks import all_gather
from mp_optim.process_groups.process_groups import ProcessGroups

_LAYER = re.compile(r"^((?:.*?\.)?layers)\.(\d+)(?=\.|$)")
_EXPERTS = (
    re.compile(r"^(.*\blocal_experts\.)(\d+)(?=\.)"),
    re.compile(r"^(.*\bexperts\.linear_fc[12]\.(?:weight|bias))(\d+)$"),
)
"""Patterns of Megatron's names of experts: a list of modules, or one module with one weight for
each expert."""


def layer_of(name: str) -> tuple[str, int] | None:
    """Return the path of the first list of layers in a name, and the index in that list. Return
    None if the name has no list of layers."""
    found = _LAYER.match(name)
    return None if found is None else (found[1], int(found[2]))


@dataclass(frozen=True)
class Numbering:
    """Converts local names to names in the whole model.

    Attributes:
        layers: local path and index of a layer -> its path and index in the whole model. With
            several chunks, a local path starts with the chunk's index.
        prefixes: prefixes of chunks, which names in the whole model do not have.
        first_experts: local path -> number of this rank's first expert.
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
    """The names of one rank's parameters and buffers in the whole model.

    Args:
        name_of: returns the name in the whole model for a local name; by default the local name.
        known: the local names. Two local names that would get the same name stay unchanged.

    Attributes:
        twice: local names that stay unchanged, because two of them would get the same name.
    """

    def __init__(self, name_of: Callable[[str], str] = str, known: Iterable[str] = ()) -> None:
        self._name_of = name_of
        names = {name: name_of(name) for name in known}
        counts = Counter(names.values())
        self.twice = [name for name, whole in names.items() if counts[whole] > 1]
        self._known = {**names, **{name: name for name in self.twice}}
        self._local = {whole: name for name, whole in self._known.items()}

    def __getitem__(self, name: str) -> str:
        """Return the name in the whole model for a local name."""
        whole = self._known.get(name)
        return self._name_of(name) if whole is None else whole

    def __contains__(self, name: str) -> bool:
        """True if this is a local name."""
        return name in self._known

    def groups_in(
        self, groups: Sequence[dict[str, Any]], live: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return saved param groups with local names.

        If groups have the local names already, or names that the whole model does not have, the
        groups are returned unchanged.

        Args:
            groups: the saved groups.
            live: the optimizer's groups.
        """
        saved, here = (
            {name for group in some for name in group.get("param_names", ())}
            for some in (groups, live)
        )
        if saved == here or not saved <= self._local.keys():
            return list(groups)
        return renamed_groups(groups, self._local)


def renamed_groups(
    groups: Sequence[dict[str, Any]], names: Mapping[str, str] | GlobalNames
) -> list[dict[str, Any]]:
    """Return copies of param groups in which each parameter name is replaced by ``names[name]``."""
    return [
        {**group, "param_names": [names[name] for name in group["param_names"]]}
        if "param_names" in group
        else group
        for group in groups
    ]


NameOf = Callable[[str], str]
_NamedChunks = Sequence[tuple[str, nn.Module]]
_UNPARTED = (".experts.weight1", ".experts.weight2")
"""Ends of the names of Megatron's weights that hold all experts in one matrix. The attributes of
such a weight do not describe its parts."""


@dataclass(frozen=True)
class ModelParallel:
    """A rank's part of a model, for tensors that do not describe their own split as DTensors do.

    Attributes:
        names: names of this rank's parameters in the whole model.
        partitions: tensor-parallel splits by local name.
        copies: local name of a copied parameter -> global rank of the pipeline stage that has the
            original.
        cut_over: global ranks that have the other tensor-parallel parts.
        named_over: global ranks that have parameters with other names in the whole model.
    """

    names: GlobalNames = field(default_factory=GlobalNames)
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    cut_over: frozenset[int] = frozenset()
    named_over: frozenset[int] = frozenset()

    def among(self, ranks: Collection[int]) -> ModelParallel:
        """Return this part of the model for a save or load by a subset of the ranks.

        If the subset lacks a rank with another tensor-parallel part, a part counts as a whole
        parameter. If the subset lacks a rank in :attr:`named_over`, names are the local ones.

        Args:
            ranks: global ranks of the subset.
        """
        is_cut = self.cut_over.issubset(ranks)
        is_named = self.named_over.issubset(ranks)
        return replace(
            self,
            partitions=self.partitions if is_cut else {},
            names=self.names if is_named else GlobalNames(),
            copies={name: self.copies[name] for name in self.copies if is_named},
        )

    @classmethod
    def of(
        cls,
        model: nn.Module | Sequence[nn.Module],
        process_groups: ProcessGroups | None = None,
        global_names: NameOf | None = None,
        expert_predicate: Callable[..., bool] | None = None,
    ) -> ModelParallel:
        """Return this rank's part of a model. Collective over ``process_groups.pp`` if there are
        several stages.

        Args:
            model: a module or a list of chunks.
            process_groups: ``tp``, ``expert_tp``, ``ep`` and ``pp`` are read.
            global_names: returns the name in the whole model for a local parameter or buffer name.
                By default ``layer_number`` gives the index of a layer of a pipeline stage; without
                ``layer_number`` the local index stays. Experts with Megatron's names
                (``local_experts.N``, ``experts.linear_fc1.weightN``) are numbered over all ranks.
            expert_predicate: ``(param, name) -> bool``, True for a parameter of an expert.

        Raises:
            ValueError: ``global_names`` returns one name for two parameters, or a parameter does
                not consist of the blocks that its attributes describe.
        """
        modules = [model] if isinstance(model, nn.Module) else list(model)
        chunks = prefixed(modules)
        groups = process_groups or ProcessGroups()
        cut_over = _members(groups.tp, groups.expert_tp)
        if global_names is None and not (cut_over or _members(groups.ep, groups.pp)):
            return cls()
        # Keep all names of a tied parameter, because the model's state dict has all of them.
        params, buffers = (
            dict(canonical_items(modules, methodcaller(method, remove_duplicate=False)))
            for method in ("named_parameters", "named_buffers")
        )
        is_expert = expert_predicate or is_expert_param
        partitions = dict(_partitions(params, chunks, groups, is_expert))
        tied: dict[str, tuple[str, int]] = {}
        if groups.pp is not None and groups.pp.size() > 1:
            tied = _tied(params, chunks, groups.pp, global_names)
        numbered = _numbering(params, chunks, groups)
        name_of = global_names or (lambda name: tied[name][0] if name in tied else numbered(name))
        names = GlobalNames(name_of, [*params, *buffers])
        if global_names is not None and names.twice:
            raise ValueError(
                f"global_names makes one name of {names_in_words(names.twice)}; return a unique "
                "name for each parameter and buffer of a rank"
            )
        same = {name: rank for name, (whole, rank) in tied.items() if names[name] == whole}
        named_over = () if global_names else (groups.ep, groups.pp)
        return cls(names, partitions, same, cut_over, _members(*named_over))


def _members(*groups: ProcessGroup | None) -> frozenset[int]:
    several = [ranks for ranks in groups if ranks is not None and ranks.size() > 1]
    return frozenset().union(*map(dist.get_process_group_ranks, several))


def _tied(
    params: Mapping[str, Tensor],
    chunks: _NamedChunks,
    stages: ProcessGroup,
    global_names: NameOf | None,
) -> dict[str, tuple[str, int]]:
    """Return the name of the original and the rank of its stage, for each local copy of a tied
    embedding. Collective over the stages."""
    marked = {name: p for name, p in params.items() if getattr(p, "shared_embedding", False)}
    copies = {name for name, param in marked.items() if getattr(param, "shared", False)}
    prefixes = tuple(prefix for prefix, _ in chunks if prefix)
    name_of = global_names or Numbering(prefixes=prefixes)
    own = next((name_of(name) for name in marked if name not in copies), None), dist.get_rank()
    originals = all_gather(stages, "finding the pipeline's tied embedding", own)
    del originals[stages.rank()]
    found = [(name, rank) for name, rank in originals if name is not None]
    return dict.fromkeys(copies, found[0]) if found else {}


def _numbering(params: Iterable[str], chunks: _NamedChunks, groups: ProcessGroups) -> Numbering:
    experts: dict[str, int] = {}
    if (ep := groups.ep) is not None and ep.size() > 1:
        indices: dict[str, set[int]] = {}
        for name, pattern in itertools.product(params, _EXPERTS):
            if found := pattern.match(name):
                indices.setdefault(found[1], set()).add(int(found[2]))
        # The product below numbers experts correctly only if local indices are 0, 1, 2, ... Experts
        # with other indices keep their local names.
        experts = {
            path: ep.rank() * len(each)
            for path, each in indices.items()
            if each == set(range(len(each)))
        }
    if groups.pp is None or groups.pp.size() == 1:
        return Numbering(first_experts=experts)
    layers: dict[tuple[str, int], tuple[str, int]] = {}
    for prefix, name, module in _modules(chunks):
        # Megatron counts layer_number from 1, over all stages.
        layer, number = layer_of(name), getattr(module, "layer_number", None)
        if layer is None or name != f"{layer[0]}.{layer[1]}":
            continue
        if type(number) is int and number > 0:
            layers[layer] = layer[0].removeprefix(prefix), number - 1
    return Numbering(layers, tuple(prefix for prefix, _ in chunks if prefix), experts)


# -- names and numbers in a model -----------------------------------------------------------------


def _modules(chunks: _NamedChunks) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every module with its chunk's prefix and its canonical name."""
    for prefix, chunk in chunks:
        for name, module in chunk.named_modules(remove_duplicate=False):
            yield prefix, prefix + canonical_name(chunk, name), module


# -- tensor parallelism ---------------------------------------------------------------------------


def _partitions(
    params: Mapping[str, Tensor],
    chunks: _NamedChunks,
    groups: ProcessGroups,
    is_expert: Callable[..., bool],
) -> Iterator[tuple[str, Partition]]:
    gated = {
        f"{name}.linear_fc1"
        for _, name, module in _modules(chunks)
        if getattr(getattr(module, "config", None), "gated_linear_unit", False)
    }
    for name, param in params.items():
        ranks = groups.expert_tp if is_expert(param, name) else groups.tp
        if is_expert_param(param, name) and groups.expert_tp is not None:
            # Experts are split over expert_tp, even if the caller's predicate treats experts as
            # dense.
            ranks = groups.expert_tp
        dim = partition_dim(param)
        if ranks is None or ranks.size() == 1 or not is_tensor_parallel(param):
            continue
        if dim is None or name.endswith(_UNPARTED):
            continue
        mesh = param.device_mesh.mesh.flatten().tolist() if is_dtensor(param) else []
        if {*mesh}.issuperset(dist.get_process_group_ranks(ranks)):
            # The mesh has all tensor-parallel ranks, so the DTensor itself describes the split, and
            # the parameter needs no partition.
            continue
        stride, sizes = partition_form(param)
        if name.rpartition(".")[0] in gated:
            # Count gate and up as two blocks, because some of Megatron's layers leave
            # partition_stride at 1 although both are fused.
            stride = max(stride, 2)
        form = stride, sizes
        yield name, partition(name, param.shape, dim, form, ranks.rank(), ranks.size())
