"""The kernels that ``auto`` chooses, and equal bits in every place."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.section import Section
from lab.gpu.waiting import with_host_verdict
from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.apps.float8 import quantize_weights
from mp_optim.kernels import choose_backend, proof_of
from mp_optim.kernels.triton import triton_backend
from mp_optim.rules.rule_optimizer import RuleOptimizer

STEPS = 50


def chosen(device: torch.device) -> Section:
    """Return the backend that ``auto`` takes, its Triton version and the time of its self-test.

    Raises:
        RuntimeError: on a GPU, ``auto`` chooses another backend than Triton.
    """
    began = time.perf_counter()
    backend, why = choose_backend("auto", device)
    seconds = time.perf_counter() - began
    _, runs_on = triton_backend()
    if device.type == "cuda" and backend.name != "triton":
        raise RuntimeError(f"auto chooses {backend.name}; {runs_on}; {why}")
    section = Section(f"auto chooses {backend.name}; {runs_on}")
    section.rows["until it is chosen"] = {"seconds": seconds}
    began = time.perf_counter()
    proof = proof_of(backend.name, device, by_form=False)
    section.rows[f"a step of each rule: {proof.reason}"] = {"seconds": time.perf_counter() - began}
    return section


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(64, 96), nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64)]
    return nn.Sequential(*layers).to(torch.bfloat16).to(device)


def _train(
    device: torch.device,
    steps: int,
    fraction: float,
    on_host: bool = False,
    float8: bool = False,
    mesh: DeviceMesh | None = None,
    **settings: Any,
) -> tuple[list[float], list[Tensor]]:
    if fraction > 0.0:
        settings |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    model = _model(device)
    if float8:
        quantize_weights(model)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(bf16=True, lr=1e-2, clip_grad=1.0, **settings), model
    )
    if on_host:
        with_host_verdict(optimizer)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(step)).to(
            device
        )
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(tokens[:-1]).float(), tokens[1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    wholes = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return losses, [whole.detach().float().cpu() for whole in wholes]


def _equal(a: tuple[list[float], list[Tensor]], b: tuple[list[float], list[Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def bits(device: torch.device, steps: int = STEPS) -> Section:
    torch.use_deterministic_algorithms(True, warn_only=True)
    section = Section("The same bits: 1 is yes")
    kinds: dict[str, dict[str, Any]] = {
        "FP32 states": {},
        "8-bit moments, remainders": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "uint8",
            "exp_avg_sq_dtype": "uint8",
        },
    }
    for kind, settings in kinds.items():
        expected = _train(device, steps, 0.0, **settings)
        for fraction in (0.5, 1.0):
            same = _equal(_train(device, steps, fraction, **settings), expected)
            section.rows[f"{kind}: {steps} steps, fraction {fraction} as 0"] = {"same": float(same)}
        same = _equal(_train(device, steps, 0.0, on_host=True, **settings), expected)
        section.rows[f"{kind}: {steps} steps, verdict on the host as on the device"] = {
            "same": float(same)
        }
    expected = _train(device, steps, 0.0, float8=True)
    for fraction in (0.5, 1.0):
        same = _equal(_train(device, steps, fraction, float8=True), expected)
        section.rows[f"float8 weights: {steps} steps, fraction {fraction} as 0"] = {
            "same": float(same)
        }
    for rule in ("adam", "lamb", "lion"):
        for states, precision in _STATES.items():
            ours, theirs = (
                _stream(rule, where, precision) for where in (device, torch.device("cpu"))
            )
            same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            section.rows[f"{rule}, {states}: one stream of gradients, device as CPU"] = {
                "same": float(same)
            }
    torch.use_deterministic_algorithms(False)
    return section


def ranks(device: torch.device, steps: int = STEPS) -> Section:
    """1 where a run with process groups, of this one rank, has the bits of a run without any:
    ZeRO and FSDP2, with and without a part on the host. The collectives are NCCL's on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = _train(device, steps, 0.0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    section = Section(f"One rank of {backend} as no ranks: 1 is yes")
    mesh = init_device_mesh(device.type, (1,))
    zero = {"use_distributed_optimizer": True}
    kinds: dict[str, dict[str, Any]] = {
        "a group": {},
        "ZeRO": zero,
        "ZeRO, gradients in shards": zero | {"data_parallel_sharding_strategy": "optim_grads"},
        "ZeRO, gathered in forward": zero | {"overlap_param_gather": True},
        "FSDP2": {"mesh": mesh},
    }
    for kind, settings in kinds.items():
        for fraction in (0.0, 0.5):
            same = _equal(_train(device, steps, fraction, **settings), expected)
            section.rows[f"{kind}: {steps} steps, fraction {fraction}"] = {"same": float(same)}
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    return section


_STATES: dict[str, dict[str, Any]] = {
    "FP32 states": {},
    "8-bit states": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}


def _stream(rule: str, device: torch.device, precision: dict[str, Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    params = [
        nn.Parameter(torch.randn(size, generator=generator).to(device))
        for size in (1, 1000, 300_001)
    ]
    optimizer = RuleOptimizer(rule, params, lr=1e-2, weight_decay=0.1, **precision)
    for _ in range(20):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        optimizer.step()
    return [param.detach().cpu() for param in params]
