"""Four gloo processes train data-parallel with all, some or no state sharded.

Each rank has other data.
"""

import gc
import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mp_optim import ChainedOptimizer, MegatronOptimizer, ProcessGroups, get_megatron_optimizer
from mp_optim.apps.fit.model_plan import Layout, plan
from mp_optim.core.flat_shard import FlatShard
from mp_optim.zero.collectives import start_reduction
from support.as_rank import as_rank, error_of
from support.models import DTYPES, TinyMoE, config_for, is_expert, tokens_of

BYTES = [("no_shard", False), ("optim", False), ("optim", True), ("optim_grads", False)]


def build(
    precision: str, strategy: str, group: dist.ProcessGroup, **more: Any
) -> tuple[TinyMoE, MegatronOptimizer]:
    model = TinyMoE(DTYPES[precision])
    settings = {
        "use_distributed_optimizer": True,
        "data_parallel_sharding_strategy": strategy,
        "bucket_size": 150,
        **more,
    }
    return model, get_megatron_optimizer(
        config_for(precision, **settings),
        model,
        expert_predicate=is_expert,
        process_groups=ProcessGroups(dp=group),
    )


def digest(tensors: dict[str, Tensor]) -> str:
    data = b"".join(
        value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for _, value in sorted(tensors.items())
    )
    return hashlib.sha256(data).hexdigest()


def fraction_for_all(rank: int, group: dist.ProcessGroup) -> list[float | str]:
    found: list[float | str] = []
    for least in (160_000, 1_000):
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]).bfloat16()
        config = config_for(
            "bf16",
            use_distributed_optimizer=True,
            optimizer_cpu_offload=True,
            bucket_size=8192,
            optimizer_offload_fraction="auto",
            gpu_memory=200_000 if rank else least,
        )
        groups = ProcessGroups(dp=group)
        try:
            optimizer = get_megatron_optimizer(config, model, process_groups=groups)
            found.append(optimizer.config.optimizer_offload_fraction)
        except ValueError as error:
            found.append(str(error))
    return found


def forgotten_groups(groups: dict[str, dist.ProcessGroup]) -> list[str]:
    config = config_for("fp32", use_distributed_optimizer=True)
    return [
        error_of(
            lambda given=given: get_megatron_optimizer(
                config,
                nn.ModuleDict({"experts": nn.Linear(24, 24)}),
                expert_predicate=is_expert,
                process_groups=ProcessGroups(**given),
            )
        )
        for given in ({"expert_dp": groups["expert_dp"]}, {"expert_grad_stats": groups["ep"]})
    ]


def duplicates(rank: int, layout: str, groups: dict[str, dist.ProcessGroup]) -> float:
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(300)) for name in ("own", "twin", "shared")}
    )
    model["own"].tensor_model_parallel, model["shared"].shared = True, True
    config = config_for(
        "fp32",
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=layout,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(
        config,
        model,
        process_groups=ProcessGroups(
            dp=groups["expert_dp"], grad_stats=groups["ep"], tp=groups["ep"]
        ),
    )
    # The data-parallel groups average to 3 and 4.
    model["own"].grad = torch.full((300,), [2.0, 3.0, 4.0, 5.0][rank])
    model["twin"].grad, model["shared"].grad = (torch.full((300,), 6.0), torch.full((300,), 100.0))
    return optimizer.step().grad_norm


def starts_alike(rank: int, group: dist.ProcessGroup) -> str:
    model = nn.Linear(40, 40)
    with torch.no_grad():
        model.weight.fill_(rank + 1.0)
        model.bias.fill_(rank + 2.0)
    get_megatron_optimizer(
        config_for("fp32", use_distributed_optimizer=True),
        model,
        process_groups=ProcessGroups(dp=group),
    )
    return str([model.weight.unique().tolist(), model.bias.unique().tolist()])


def sums_are_in_the_order_of_ranks(rank: int, group: dist.ProcessGroup) -> dict[str, bool]:
    ranks, found = group.size(), {}
    for dtype, divisor, add in (
        (torch.float32, 4, False),
        (torch.bfloat16, 1, False),
        (torch.bfloat16, 3, True),
    ):
        every = [
            (torch.randn(ranks * 64, generator=torch.Generator().manual_seed(r)) * 10**r).to(dtype)
            for r in range(ranks)
        ]
        owned = torch.ones(64, dtype=dtype)
        bounds = range(0, ranks * 64 + 1, 64)
        start_reduction(
            every[rank], owned, group, bounds, divisor=divisor, exchange=True, add=add
        ).wait()
        mine = [grad[rank * 64 : (rank + 1) * 64].float() for grad in every]
        total = ((mine[0] + mine[1]) + mine[2] + mine[3]) / divisor
        found[f"{dtype} {divisor}"] = torch.equal(owned, (total + 1.0 if add else total).to(dtype))
    for divisor, add in ((1, False), (3, True)):
        found[f"to owners {divisor}"] = goes_to_owners(rank, group, divisor, add)
    return found


def goes_to_owners(rank: int, group: dist.ProcessGroup, divisor: int, add: bool) -> bool:
    bounds, each = (0, 64, 64, 100, 256), torch.arange(256.0)
    grads, first, last = 3.0 * (each + rank), bounds[rank], bounds[rank + 1]
    owned = torch.ones(last - first) if add else grads[first:last]
    start_reduction(grads, owned, group, bounds, divisor=divisor, exchange=False, add=add).wait()
    return torch.equal(owned, (12.0 * each + 18.0)[first:last] / divisor + add)


def linears(
    group: dist.ProcessGroup | None, bucket_size: int = 1500
) -> tuple[nn.Module, MegatronOptimizer]:
    """Build layers with weights split over the ranks of a group, or whole layers."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).bfloat16()
    shards = {"use_distributed_optimizer": True, "bucket_size": bucket_size}
    config = config_for("bf16", **(shards if group else {}))
    return model, get_megatron_optimizer(config, model, process_groups=ProcessGroups(dp=group))


def other_ranges(group: dist.ProcessGroup) -> str:
    (_, optimizer), (_, other) = linears(group), linears(group, bucket_size=4000)
    return error_of(lambda: other.load_state_dict(optimizer.state_dict()))


def whole_state(group: dist.ProcessGroup) -> bool:
    torch.manual_seed(0)
    model, alone = linears(None)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).to(param.dtype)
    alone.step()
    sharded, optimizer = linears(group)
    sharded.load_state_dict(model.state_dict())
    optimizer.load_state_dict(alone.state_dict())
    mains = {name: main.detach().flatten() for name, main in alone.named_main_params()}
    return all(
        torch.equal(shard.local, mains[name][shard.start : shard.start + len(shard.local)])
        for name, shard in optimizer.named_main_params()
    )


def live_bytes() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [
            item
            for item in gc.get_objects()
            if isinstance(item, Tensor) and not isinstance(item, FlatShard)
        ]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def bytes_of(layout: str, fp32_reduce: bool, group: dist.ProcessGroup) -> dict[str, float]:
    with torch.device("meta"):
        meta = nn.Sequential(*[nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(6)])
    before = live_bytes()
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(6)])
    config = config_for(
        "bf16",
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=layout,
        grad_reduce_in_fp32=fp32_reduce,
        bucket_size=100_000,
    )
    optimizer = get_megatron_optimizer(config, model, process_groups=ProcessGroups(dp=group))
    optimizer.zero_grad()
    model(torch.ones(4, 256, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    metrics = optimizer.metrics()
    held = live_bytes() - before
    planned = plan(meta, config, Layout(dp=group.size()))
    return {
        "held": held,
        "planned": planned.accelerator.total + planned.host_total,
        "params": sum(p.numel() for p in model.parameters()),
        **{key: metrics[key] for key in ("bytes_reduced", "bytes_gathered")},
    }


def misuse(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    found = {}
    model, optimizer = build("bf16", "optim", group, **overlap)
    loss = model(tokens_of(rank))
    loss.backward(retain_graph=True)
    loss.backward()
    found["second backward"] = error_of(optimizer.step)
    model, optimizer = build("bf16", "optim", group, **overlap)
    optimizer.zero_grad()
    model(tokens_of(rank)).backward()
    optimizer.step()
    optimizer.finish_param_sync()
    model(tokens_of(rank)).backward()
    found["no zero_grad"] = error_of(optimizer.step)
    optimizer.zero_grad()
    for name in ("module not called", "waited by hand"):
        optimizer.step()
        optimizer.zero_grad()
        if name == "waited by hand":
            optimizer.finish_param_sync()
        found[name] = error_of(lambda: (2.0 * model.dense).sum().backward())
    return found


def passes_of_some(rank: int, group: dist.ProcessGroup) -> list[tuple[float, str]]:
    found = []
    for idle in (False, True):
        model, optimizer = build("fp32", "optim_grads", group)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(3):
                has_work = part < (rank + step) % 4
                if has_work or not idle:
                    loss = model(tokens_of(100 * step + 10 * rank + part))
                    (loss * has_work).backward()
            if step == 2:  # Finishing the reduction explicitly adds a collective.
                optimizer.finish_grad_sync()
            norm = optimizer.step().grad_norm
        optimizer.finish_param_sync()
        found.append((norm, digest(model.state_dict())))
    return found


def parts_of_some(rank: int, own: dict[str, dist.ProcessGroup]) -> str:
    def part(name: str, group: dist.ProcessGroup | None) -> MegatronOptimizer:
        model = nn.ParameterDict({name: nn.Parameter(torch.ones(40))})
        model[name].grad = torch.full((40,), float(rank))
        config = config_for("fp32", use_distributed_optimizer=True)
        return get_megatron_optimizer(config, model, process_groups=ProcessGroups(dp=group))

    experts = [part(f"expert {number}", own["expert_dp"]) for number in range(1 + rank % 2)]
    members = [part("first", dist.group.WORLD), *experts, part("last", dist.group.WORLD)]
    return error_of(lambda: ChainedOptimizer(members).step())


def disagree(group: dist.ProcessGroup) -> dict[str, str]:
    """Return this rank's error for each way in which ranks may disagree."""
    rank = dist.get_rank()

    def built(sizes: tuple[int, int], lr: float = 0.1, reverse: bool = False) -> MegatronOptimizer:
        params = [(f"w{size}", nn.Parameter(torch.zeros(size))) for size in sizes]
        named = [
            {"params": [p], "param_names": [n], "lr": lr}
            for n, p in (reversed(params) if reverse else params)
        ]
        config = config_for("fp32", use_distributed_optimizer=True, lr=lr)
        return get_megatron_optimizer(
            config,
            nn.ParameterDict(params),
            process_groups=ProcessGroups(dp=group),
            param_groups=named,
        )

    found = {
        "model": error_of(lambda: built((300, 40 if rank == 1 else 50))),
        "config": error_of(lambda: built((300, 50), 0.2 if rank == 2 else 0.1)),
        "order": error_of(lambda: built((300, 50), reverse=rank == 1)),
    }
    optimizer = built((300, 50))
    if rank == 2:
        optimizer.param_groups[1]["lr"] = 0.3
    found["lr"] = error_of(optimizer.step)
    return found


def main(folder: Path) -> Any:
    rank, four = dist.get_rank(), dist.new_group([0, 1, 2, 3])
    halves = {
        name: [dist.new_group(list(ranks)) for ranks in both]
        for name, both in {"expert_dp": ((0, 2), (1, 3)), "ep": ((0, 1), (2, 3))}.items()
    }
    own = {"expert_dp": halves["expert_dp"][rank % 2], "ep": halves["ep"][rank // 2]}
    return {
        "forgotten groups": forgotten_groups(own),
        "duplicates": [duplicates(rank, layout, own) for layout in ("no_shard", "optim")],
        "sums": sums_are_in_the_order_of_ranks(rank, four),
        "fraction": fraction_for_all(rank, four),
        "start": starts_alike(rank, four),
        "other ranges": other_ranges(four),
        "whole state": whole_state(four),
        "bytes": {str(key): bytes_of(*key, four) for key in BYTES},
        "misuse": misuse(rank, four),
        "passes of some": passes_of_some(rank, four),
        "parts of some": parts_of_some(rank, own),
        "disagree": disagree(four),
    }


if __name__ == "__main__":
    as_rank(main)
