"""ModelParallel: what of the whole model this rank has, and what it is called there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.core.names import canonical_name, canonical_names, names_in_words, prefixed
from mp_optim.core.param_attributes import (
    is_expert_param,
    is_shared,
    is_tensor_parallel,
    is_tied_embedding,
    partition_dim,
    partition_sizes,
    partition_stride,
)
from mp_optim.core.partition import Partition, partition
from mp_optim.host.torch_types import is_dtensor
from mp_optim.process_groups.missing_ranks import all_gather
from mp_optim.process_groups.process_groups import ProcessGroups


def layer_number(module: nn.Module) -> int | None:
    """``layer_number``: which layer of the whole model this is, from 1; None if nothing is said."""
    number = getattr(module, "layer_number", None)
    return number if type(number) is int and number > 0 else None


def has_gated_first_layer(module: nn.Module) -> bool:
    """Whether ``linear_fc1`` of an MLP holds gate and up behind each other
    (``config.gated_linear_unit``)."""
    config = getattr(module, "config", None)
    gated = bool(getattr(config, "gated_linear_unit", False))
    return gated and "linear_fc1" in module._modules


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
    placed: list[list[dict[tuple[str, int], int]]] = [[{} for _ in chunks] for chunks in stages]
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
    return {path: len(each) for path, each in indices.items() if each == set(range(len(each)))}


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

    def __init__(self, name_of: Callable[[str], str] = str, known: Iterable[str] = ()) -> None:
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

    def __contains__(self, name: str) -> bool:
        """Whether this is a name here, of a model that ranks share."""
        return name in self._known

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
    def _renamed(group: dict[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
        if "param_names" not in group:
            return group
        return {**group, "param_names": [*map(name_of, group["param_names"])]}


def _names(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for group in groups for name in group.get("param_names", ())}


NameOf = Callable[[str], str]
_NamedChunks = Sequence[tuple[str, nn.Module]]
_UNPARTED = (".experts.weight1", ".experts.weight2")
"""Megatron's weights of all experts in one matrix: its attributes do not tell their parts."""


@dataclass(frozen=True)
class ModelParallel:
    """How ranks share a model out, where its tensors do not say so themselves (as DTensors do).

    Attributes:
        names: of this rank's parameters in the whole model.
        partitions: of the parameters that tensor parallelism cuts, by name here.
        copies: parameters here whose original another stage of the pipeline has: by name, the
            global rank of that stage.
        cut_over: global ranks that have the other parts.
        named_over: global ranks that the names tell from this one.
    """

    names: GlobalNames = field(default_factory=GlobalNames)
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    cut_over: frozenset[int] = frozenset()
    named_over: frozenset[int] = frozenset()

    def among(self, ranks: Collection[int]) -> ModelParallel:
        """What some ranks have to know of it. A part is all there is where the ranks with the
        other parts are not among them; names are those here where the ranks are not that names
        tell this one from."""
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
        """Of a model. Collective over ``process_groups.pp``, if there are several stages.

        Args:
            model: a module or a list of chunks.
            process_groups: ``tp``, ``expert_tp``, ``ep`` and ``pp`` are read.
            global_names: what a parameter or buffer is called in the whole model, from its name
                here. By default layers and experts are counted through where they are named as
                Megatron does: ``layers.N``, ``local_experts.N``, ``experts.linear_fc1.weightN``.
            expert_predicate: ``(param, name) -> bool``, which parameters are experts.

        Raises:
            ValueError: ``global_names`` makes one name of two, or a parameter does not consist of
                the blocks that its attributes speak of; naming it.
        """
        chunks = prefixed([model] if isinstance(model, nn.Module) else list(model))
        groups = process_groups or ProcessGroups()
        if global_names is None and not _shares(groups):
            return cls()
        params = dict(_params(chunks))
        is_expert = expert_predicate or is_expert_param
        partitions = dict(_partitions(params, chunks, groups, is_expert))
        own = Stage(_layers(chunks), *_original(params, chunks, global_names))
        stages, place = _told(own, groups.pp)
        tied = _tied(params, stages, place)
        numbered = _numbering(params, chunks, groups.ep, stages, place)
        name_of = global_names or (lambda name: tied[name][0] if name in tied else numbered(name))
        names = GlobalNames(name_of, [*params, *_buffers(chunks)])
        if global_names is not None:
            names.check()
        same = {name: rank for name, (whole, rank) in tied.items() if names[name] == whole}
        named_over = () if global_names else (groups.ep, groups.pp)
        cut_over = _members(groups.tp, groups.expert_tp)
        return cls(names, partitions, same, cut_over, _members(*named_over))


def _shares(groups: ProcessGroups) -> bool:
    of_model = groups.tp, groups.expert_tp, groups.ep, groups.pp
    return any(ranks is not None and ranks.size() > 1 for ranks in of_model)


def _members(*groups: ProcessGroup | None) -> frozenset[int]:
    several = [ranks for ranks in groups if ranks is not None and ranks.size() > 1]
    return frozenset().union(*map(dist.get_process_group_ranks, several))


class Stage(NamedTuple):
    """What a stage of a pipeline tells the others.

    Attributes:
        layers: by chunk. original: of tied embeddings, the whole model's name of the one that
            counts, if it is here. rank: global.
    """

    layers: Chunks
    original: str | None = None
    rank: int = 0


def _told(own: Stage, pp: ProcessGroup | None) -> tuple[list[Stage], int]:
    """What all stages tell, and which of them this is."""
    if pp is None or pp.size() == 1:
        return [own], 0
    return all_gather(pp, "counting the layers of the pipeline's stages", own), pp.rank()


def _tied(
    params: Mapping[str, Tensor], stages: Sequence[Stage], place: int
) -> dict[str, tuple[str, int]]:
    """Copies of another stage's embedding: by name, that one's name and rank."""
    for stage in stages:
        if stage.original is not None and stage is not stages[place]:
            original = stage.original, stage.rank
            copies = (
                name
                for name, param in params.items()
                if is_tied_embedding(param) and is_shared(param)
            )
            return dict.fromkeys(copies, original)
    return {}


def _numbering(
    params: Iterable[str],
    chunks: _NamedChunks,
    ep: ProcessGroup | None,
    stages: Sequence[Stage],
    place: int,
) -> Numbering:
    experts: dict[str, int] = {}
    if ep is not None and ep.size() > 1:
        counts = expert_counts(params)
        experts = {path: ep.rank() * counts[path] for path in counts}
    if len(stages) == 1:
        return Numbering(first_experts=experts)
    indices = layer_indices([stage.layers for stage in stages])[place]
    layers: dict[tuple[str, int], tuple[str, int]] = {}
    for (prefix, _), of_chunk in zip(chunks, indices, strict=True):
        for (path, index), there in of_chunk.items():
            layers[prefix + path, index] = path, there
    return Numbering(layers, tuple(prefix for prefix, _ in chunks if prefix), experts)


# -- names and numbers in a model -----------------------------------------------------------------


def _params(chunks: _NamedChunks) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under every canonical name it has."""
    for prefix, chunk in chunks:
        named = dict(chunk.named_parameters(remove_duplicate=False))
        for name, short in canonical_names(chunk, named).items():
            yield prefix + short, named[name]


def _buffers(chunks: _NamedChunks) -> Iterator[str]:
    for prefix, chunk in chunks:
        named = dict(chunk.named_buffers(remove_duplicate=False))
        yield from (prefix + name for name in canonical_names(chunk, named).values())


def _modules(chunks: _NamedChunks) -> Iterator[tuple[int, str, nn.Module]]:
    """Every module with its chunk's index and its canonical name."""
    for index, (prefix, chunk) in enumerate(chunks):
        for name, module in chunk.named_modules(remove_duplicate=False):
            yield index, prefix + canonical_name(chunk, name), module


def _layers(chunks: _NamedChunks) -> Chunks:
    layers: list[dict[tuple[str, int], Layer]] = [{} for _ in chunks]
    for chunk, name, module in _modules(chunks):
        path, index = layer_of(name.removeprefix(chunks[chunk][0])) or ("", 0)
        if name == f"{chunks[chunk][0]}{path}.{index}":
            number = layer_number(module)
            said = None if number is None else number - 1
            layers[chunk][path, index] = Layer(path, index, said)
    return [list(of_chunk.values()) for of_chunk in layers]


def _original(
    params: Mapping[str, Tensor], chunks: _NamedChunks, global_names: NameOf | None
) -> tuple[str | None, int]:
    """The name of the tied embedding that counts, if it is here, and this rank's number."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, param in params.items():
        if is_tied_embedding(param) and not is_shared(param):
            prefixes = tuple(prefix for prefix, _ in chunks if prefix)
            return (global_names or Numbering(prefixes=prefixes))(name), rank
    return None, rank


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
        if has_gated_first_layer(module)
    }
    for name, param in params.items():
        ranks = groups.expert_tp if is_expert(param, name) else groups.tp
        if is_expert_param(param, name) and groups.expert_tp is not None:
            ranks = groups.expert_tp  # also where experts are reduced like the rest
        dim = partition_dim(param)
        if ranks is None or ranks.size() == 1 or not is_tensor_parallel(param):
            continue
        if dim is None or name.endswith(_UNPARTED) or _says_itself(param, ranks):
            continue
        stride = partition_stride(param)
        if name.rpartition(".")[0] in gated:
            stride = max(stride, 2)  # some of Megatron's layers leave it at 1
        yield (
            name,
            partition(
                name,
                param.shape,
                dim,
                stride=stride,
                sizes=partition_sizes(param),
                rank=ranks.rank(),
                size=ranks.size(),
            ),
        )


def _says_itself(param: Tensor, ranks: ProcessGroup) -> bool:
    """Whether a tensor is a DTensor over these ranks."""
    if not is_dtensor(param):
        return False
    mesh = {*param.device_mesh.mesh.flatten().tolist()}
    return mesh.issuperset(dist.get_process_group_ranks(ranks))
