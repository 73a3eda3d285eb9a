"""Four gloo processes step NorMuon over parts that Megatron's tensor-parallel attributes describe.
Parts are single or fused blocks, replicated or sharded over data-parallel ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mp_optim import OptimizerConfig, ProcessGroups, get_megatron_optimizer
from support.as_rank import as_rank

STEPS = 4


class Cut(NamedTuple):
    """A parameter's whole shape, its split dimension, and the sizes of its fused blocks."""

    shape: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[int, ...] = ()
    attribute: str = ""

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        if self.dim is None:
            return whole.clone()
        blocks = whole.split(self.blocks, self.dim)
        return torch.cat([block.chunk(ranks, self.dim)[rank] for block in blocks], self.dim)

    def say(self, param: Any, ranks: int) -> None:
        param.tensor_model_parallel = self.dim is not None
        if self.dim is None:
            return
        param.partition_dim = self.dim
        if self.attribute == "stride":
            param.partition_stride = len(self.blocks)
        if self.attribute == "sizes":
            param.partition_sizes = [block // ranks for block in self.blocks]


CUTS = {
    "rows": Cut((24, 10), 0, (24,)),
    "columns": Cut((6, 20), 1, (20,)),
    "gate and up": Cut((256, 32), 0, (128, 128), "stride"),
    "three": Cut((36, 40), 0, (12, 12, 12), "stride"),
    "across": Cut((24, 256), 1, (128, 128), "stride"),
    "unequal": Cut((240, 32), 0, (40, 120, 80), "sizes"),
    "stack": Cut((3, 16, 12), 1, (8, 8), "stride"),
    "experts": Cut((4, 6, 9), 0, (4,)),
    "bias": Cut((16,), 0, (16,)),
    "norm": Cut((7,)),
}
NORMUON: dict[str, Any] = {
    **{"optimizer": "muon", "lr": 0.05, "muon_fp32_matmul_prec": "highest", "clip_grad": 0.0},
    **{"muon_moment2_method": "normuon", "muon_beta2": 0.8},
}
ZERO: dict[str, dict[str, Any]] = {
    "optim": {"use_distributed_optimizer": True},
    "no_shard": {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "no_shard"},
    "layer-wise": {"use_layer_wise_distributed_optimizer": True},
}
LAYOUTS = ["alone", "on the host", *ZERO]

OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}


class Refused(NamedTuple):
    settings: dict[str, Any]
    cut: Cut
    says: str


REFUSED = {
    "speculative": Refused(
        OFFLOAD | {"offload_mode": "speculative"},
        CUTS["rows"],
        "offload_mode='speculative': cut is split over ranks, and muon steps the",
    ),
    "stride": Refused(
        {},
        Cut((24, 10), 0, (2,) * 5, "stride"),
        "cut.partition_stride=5: dimension 0 of (12, 10) cannot be split",
    ),
}


def told_of(case: Refused, groups: ProcessGroups) -> str:
    rows, columns = case.cut.shape
    model = nn.ParameterDict({"cut": torch.zeros(rows // 2, columns)})
    case.cut.say(model["cut"], 2)
    try:
        config = OptimizerConfig(optimizer="muon", lr=0.1, **case.settings)
        get_megatron_optimizer(config, model, process_groups=groups)
    except ValueError as error:
        return str(error)
    return "nothing"


def values(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    found = {}
    for name, cut in CUTS.items():
        value = torch.randn(cut.shape, generator=generator)
        value[cut.shape[0] // 2 :] *= 4.0 ** max(step, 0)
        found[name] = value
    return found


def train(
    rank: int, ranks: int, groups: ProcessGroups | None, **settings: Any
) -> dict[str, Tensor]:
    def parts(step: int) -> dict[str, Tensor]:
        return {name: CUTS[name].part(value, rank, ranks) for name, value in values(step).items()}

    model = nn.ParameterDict(parts(-1))
    for name, param in model.items():
        CUTS[name].say(param, ranks)
    config = OptimizerConfig(**NORMUON, **settings)
    optimizer = get_megatron_optimizer(config, model, process_groups=groups)
    for step in range(STEPS):
        optimizer.zero_grad()
        grads = parts(step)
        sum((model[name] * grads[name]).sum() for name in CUTS).backward()
        assert optimizer.step().success
    return {name: param.detach().clone() for name, param in model.items()}


def main(folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = ProcessGroups.from_device_mesh(mesh)
    rank = mesh.get_local_rank("tp")
    whole = train(0, 1, None)
    expected = {name: cut.part(whole[name], rank, 2) for name, cut in CUTS.items()}
    found: dict[str, Any] = {"expected": expected}
    for layout in LAYOUTS:
        settings = OFFLOAD if layout == "on the host" else ZERO.get(layout, {})
        found[layout] = train(rank, 2, groups, **settings)
    for what, case in REFUSED.items():
        found[f"refused {what}"] = told_of(case, groups)
    return found


if __name__ == "__main__":
    as_rank(main)
