"""Two gloo processes with Megatron's parts of parameters, experts and layers, compared with the
whole model."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from mp_optim import (
    ModelParallel,
    OptimizerConfig,
    ProcessGroups,
    checkpoint,
    get_megatron_optimizer,
)
from mp_optim.checkpoint import FlatShard
from mp_optim.checkpoint.common import as_json, from_json
from mp_optim.checkpoint.reading import open_checkpoint
from support.as_rank import as_rank, error_of
from support.forged import replaced

warnings.filterwarnings("ignore")

CUTS: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "fused": ((16, 6), 0, 2),
    "second": ((5, 8), 1, 1),
    "inside": ((3, 12, 2), 1, 3),
    "vector": ((512,), 0, 1),
    "copied": ((7,), None, 1),
}
"""Whole shape, split dimension and number of blocks by parameter name."""
COMPACT = {"use_precision_aware_optimizer": True}
EIGHT_BITS = {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"}
REMAINDERS = {"store_param_remainders": True}
HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "host": {"bf16": True, **HOST},
    "remainders": {"bf16": True, **COMPACT, **REMAINDERS},
    "normuon": {
        **{"optimizer": "muon", "muon_fp32_matmul_prec": "highest"},
        "muon_moment2_method": "normuon",
    },
}


def part_of(whole: Tensor, dim: int | None, stride: int, rank: int, size: int) -> Tensor:
    if dim is None:
        return whole
    blocks = whole.chunk(stride, dim)
    return torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)


def wholes(dtype: torch.dtype, names: tuple[str, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((name, CUTS[name][0]) for name in CUTS)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes}
    return {name: values[name].to(dtype) for name in names}


def model_of(values: dict[str, Tensor], rank: int, size: int) -> nn.ParameterDict:
    model = nn.ParameterDict()
    for name, value in values.items():
        _, dim, stride = CUTS[name]
        model[name] = nn.Parameter(part_of(value, dim, stride, rank, size).clone())
        param: Any = model[name]
        param.tensor_model_parallel = dim is not None and size > 1
        param.shared_embedding = name == "fused"  # No other stage holds a copy.
        if param.tensor_model_parallel:
            param.partition_dim, param.partition_stride = dim, stride
    return model


def build(
    settings: dict[str, Any],
    group: dist.ProcessGroup | None,
    names: tuple[str, ...] = tuple(CUTS),
    seed: int = 0,
) -> tuple[nn.Module, Any]:
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    values = wholes(dtype, names)
    if seed:
        values = {name: value + seed for name, value in values.items()}
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    config = OptimizerConfig(lr=1e-2, clip_grad=0.0, **settings)
    model = model_of(values, rank, size)
    groups = ProcessGroups(tp=group, grad_stats=group)
    return model, get_megatron_optimizer(config, model, process_groups=groups)


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.sin(7.0 * param.detach().float()).to(param.dtype)
        assert optimizer.step().success


def local(value: Any) -> Any:
    return value.local if isinstance(value, FlatShard) else value


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    result = {}
    for name, param in model.named_parameters():
        result[name] = param.detach().clone()
        for key, value in optimizer.state[param].items():
            result[f"{name}.{key}"] = local(value).clone()
    return result


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def parts_are_of(whole: dict[str, Tensor], parts: dict[str, Tensor], rank: int) -> bool:
    """True if a rank's snapshot equals its part of the whole model's snapshot."""
    for label, value in whole.items():
        name, _, key = label.partition(".")
        shape, dim, stride = CUTS[name]
        is_whole = key == "step" or dim is None or value.shape[dim] != shape[dim]
        cut = value if is_whole else part_of(value, dim, stride, rank, 2)
        if not torch.equal(cut, parts[label]):
            return False
    return whole.keys() == parts.keys()


def export(folder: Path, optimizer: Any) -> dict[str, list[Any]]:
    (file,) = checkpoint.export_safetensors(folder, optimizer)
    return {name: value.tolist() for name, value in load_file(file).items()}


def sizes(root: Path, rank: int, tp: dist.ProcessGroup) -> dict[str, dict[str, bool]]:
    found: dict[str, dict[str, bool]] = {}
    for name, settings in SETTINGS.items():
        folder = root / name
        parts, whole = build(settings, tp), build(settings, None)
        train(*parts)
        train(*whole)
        alike = parts_are_of(snapshot(*whole), snapshot(*parts), rank)
        checkpoint.save(folder / "parts", *parts)
        checkpoint.save(folder / "whole", *whole)
        again = build(settings, tp, seed=1)
        checkpoint.load(folder / "parts", *again, verify=True)
        resumed = same(snapshot(*again), snapshot(*parts))
        train(*again)
        train(*parts)
        resumed &= same(snapshot(*again), snapshot(*parts))
        one = build(settings, None, seed=1)
        checkpoint.load(folder / "parts", *one)
        joined = same(snapshot(*one), snapshot(*whole))
        two = build(settings, tp, seed=1)
        checkpoint.load(folder / "whole", *two)
        cut = parts_are_of(snapshot(*whole), snapshot(*two), rank)
        exported = export(folder / "one", whole[1]) == export(folder / "two", two[1])
        found[name] = {
            "parts step as the whole": alike,
            "goes on to the bit": resumed,
            "joined": joined,
            "cut again": cut,
            "exported whole": exported,
        }
    return found


def compact(root: Path, tp: dist.ProcessGroup) -> dict[str, Any]:
    settings = {"bf16": True, **COMPACT, **EIGHT_BITS}
    found: dict[str, Any] = {}
    for name in ("vector", "fused"):
        parts = build(settings, tp, (name,))
        train(*parts)
        checkpoint.save(root / name, *parts)
        again = build(settings, tp, (name,), seed=1)
        checkpoint.load(root / name, *again)
        whole = build(settings, None, (name,), seed=1)
        text = error_of(lambda name=name, whole=whole: checkpoint.load(root / name, *whole))
        found[name] = [same(snapshot(*again), snapshot(*parts)), text]
        checkpoint.load(root / name, *whole, convert=True)
        checkpoint.save(root / f"{name} whole", *whole)
        checkpoint.load(root / f"{name} whole", *again, convert=name == "fused")
        checkpoint.save(root / f"{name} again", *again)
        found[name].append(same(snapshot(*again), snapshot(*parts)))
    return found


def without_optimizer(root: Path, tp: dist.ProcessGroup) -> list[Any]:
    parts, _ = build({}, tp)
    whole, _ = build({}, None)
    groups = ProcessGroups(tp=tp)
    parallel = ModelParallel.of(parts, groups)
    checkpoint.save(root, parts, None, model_parallel=parallel)
    other, optimizer = build({}, None, seed=1)
    checkpoint.load(root, other, None)
    joined = all(map(torch.equal, other.parameters(), whole.parameters()))
    twice = error_of(lambda: checkpoint.load(root, other, optimizer, model_parallel=parallel))
    return [joined, twice]


def refused(root: Path, rank: int, world: dist.ProcessGroup) -> dict[str, str]:
    """Return the error for each ambiguous partition and each impossible attribute."""
    values = wholes(torch.float32, ("fused", "copied"))
    config = OptimizerConfig(lr=1e-2, clip_grad=0.0)
    found = {}
    parts = model_of(values, rank, 2)
    unknown = parts, get_megatron_optimizer(config, parts)
    found["no group"] = error_of(lambda: checkpoint.save(root, *unknown))
    layers = Stage(rank, 2)
    unnamed = layers, get_megatron_optimizer(config, layers)
    found["no stages"] = error_of(lambda: checkpoint.save(root, *unnamed))
    for field, value in (("dim", 2), ("stride", 5), ("sizes", (3, 3))):
        other = model_of(values, rank, 2)
        setattr(other["fused"], f"partition_{field}", value)
        groups = ProcessGroups(tp=world)
        found[field] = error_of(
            lambda model=other, groups=groups: get_megatron_optimizer(
                config, model, process_groups=groups
            )
        )
    found["one name"] = error_of(
        lambda: get_megatron_optimizer(config, layers, global_names=lambda name: "x")
    )
    return found


class Stage(nn.Module):
    """A pipeline stage with some layers, counted from 0, which contain experts."""

    def __init__(self, rank: int, size: int, layers: int = 3, experts: int = 4) -> None:
        super().__init__()
        first, last = (0, 2) if rank == 0 else (2, layers)
        first, last = (first, last) if size == 2 else (0, layers)
        self.layers = nn.ModuleList(Layer(number, range(experts)) for number in range(first, last))
        if last == layers:
            self.norm = numbered(99)


class Layer(nn.Module):
    def __init__(self, number: int, experts: range) -> None:
        super().__init__()
        self.layer_number = number + 1
        self.local_experts = nn.ModuleList(numbered(10 * number + expert) for expert in experts)


class Experts(nn.Module):
    """A rank's experts under both of Megatron's naming schemes."""

    def __init__(self, rank: int, size: int, count: int = 4) -> None:
        super().__init__()
        here = range(count // size * rank, count // size * (rank + 1))
        self.local_experts = nn.ModuleList(map(numbered, here))
        self.experts = nn.Module()
        self.experts.linear_fc1 = nn.Module()
        for index, expert in enumerate(here):
            weight = numbered(20 + expert).weight
            self.experts.linear_fc1.register_parameter(f"weight{index}", weight)
        self.router = numbered(50)


def numbered(number: int) -> nn.Module:
    linear = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        linear.weight.fill_(float(number))
        linear.register_buffer("seen", torch.tensor(number))
    return linear


def blank(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    return model


def names(root: Path, rank: int, world: dist.ProcessGroup) -> dict[str, Any]:
    def of_stage(name: str) -> str:
        layer = name.removeprefix("layers.")
        return f"layers.{int(layer[0]) + 2 * rank}{layer[1:]}" if layer != name else name

    config = OptimizerConfig(lr=1e-2, clip_grad=0.0)
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "ep": (Experts, {"process_groups": ProcessGroups(ep=world)}),
        "pp": (Stage, {"process_groups": ProcessGroups(pp=world)}),
        "given": (Stage, {"global_names": of_stage}),
    }
    found: dict[str, Any] = {}
    for kind, (make, arguments) in kinds.items():
        model = make(rank, 2)
        optimizer = get_megatron_optimizer(config, model, **arguments)
        train(model, optimizer)
        checkpoint.save(root / kind, model, optimizer)
        whole = blank(make(0, 1))
        one = get_megatron_optimizer(config, whole)
        checkpoint.load(root / kind, whole, one)
        checkpoint.save(root / f"{kind} whole", whole, one)
        again = blank(make(rank, 2))
        other = get_megatron_optimizer(config, again, **arguments)
        checkpoint.load(root / f"{kind} whole", again, other)
        returned = same(snapshot(again, other), snapshot(model, optimizer))
        buffers = dict(again.named_buffers())
        returned &= all(map(torch.equal, buffers.values(), model.buffers()))
        saved = optimizer.state_dict()
        other.load_state_dict(saved)
        for group, live in zip(saved["param_groups"], other.param_groups, strict=True):
            called, group["param_names"] = group["param_names"], live["param_names"]
        other.load_state_dict(saved)  # A checkpoint of an older version has rank-local names.
        found[kind] = [returned, called, sorted(open_checkpoint(root / kind).entries)]
    return found


class Tied(nn.Module):
    def __init__(self, stage: int | None, fill: float = 0.5) -> None:
        super().__init__()
        first, last = stage in (0, None), stage in (1, None)
        weight: Any = nn.Parameter(torch.full((40, 32), fill))
        if first:
            self.embedding = nn.ParameterDict({"weight": weight})
        self.layers = nn.ModuleList(numbered(7) for _ in range(2 if first and last else 1))
        for number, layer in enumerate(self.layers, 1 if first else 2):
            layer.layer_number = number
        if last and not first:
            self.tail = nn.Parameter(torch.full((20, 100), fill))
            self.output_layer = nn.ParameterDict({"weight": weight})
            weight.shared = True
        elif last:
            self.tail = nn.Parameter(torch.full((20, 100), fill))
        weight.shared_embedding = stage is not None


def tied(root: Path) -> list[bool]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    groups, stage = ProcessGroups.from_device_mesh(mesh), mesh["pp"].get_local_rank()
    sharded = OptimizerConfig(lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True)

    def of_stage(fill: float) -> tuple[nn.Module, Any]:
        model = Tied(stage, fill)
        return model, get_megatron_optimizer(sharded, model, process_groups=groups)

    pair, whole = of_stage(0.5), Tied(None, 0.25)
    train(*pair)
    checkpoint.save(root / "stages", *pair)
    plain = OptimizerConfig(lr=1e-2, clip_grad=0.0)
    one = whole, get_megatron_optimizer(plain, whole)
    checkpoint.load(root / "stages", *one)
    held = pair[0].embedding if stage == 0 else pair[0].output_layer
    found = [torch.equal(whole.embedding["weight"], held["weight"])]
    checkpoint.save(root / "one", *one)
    again = of_stage(0.25)
    checkpoint.load(root / "one", *again)
    return [*found, same(snapshot(*again), snapshot(*pair))]


def other_weights(root: Path, rank: int, world: dist.ProcessGroup) -> list[Any]:
    remainders = {"bf16": True, **COMPACT, **REMAINDERS}
    parts = build(remainders, world, ("fused", "copied"))
    train(*parts)
    version = checkpoint.save(root, *parts)
    again = build({"bf16": True}, world, ("fused", "copied"), seed=1)
    checkpoint.load(root, *again)
    if rank == 0:
        common = from_json((version / "common.json").read_bytes())
        for group in common["optimizer"]["param_groups"]:
            sums = group["param_checksums"]
            group["param_checksums"] = [x ^ 1 if isinstance(x, int) else x for x in sums]
        replaced(version, "common.json", as_json(common))
    dist.barrier()
    before = snapshot(*again)
    text = error_of(lambda: checkpoint.load(root, *again))
    return [text, same(snapshot(*again), before)]


def main(folder: Path) -> Any:
    rank, root, world = dist.get_rank(), folder, dist.group.WORLD
    assert world is not None
    if dist.get_world_size() == 4:
        result: dict[str, Any] = {"tied": tied(root / "tied")}
    else:
        result = {
            "sizes": sizes(root / "sizes", rank, world),
            "compact": compact(root / "compact", world),
            "model": without_optimizer(root / "model", world),
            "refused": refused(root / "refused", rank, world),
            "other weights": other_weights(root / "other weights", rank, world),
            "names": names(root / "names", rank, world),
        }
    return result


if __name__ == "__main__":
    as_rank(main)
