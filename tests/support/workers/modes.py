"""Two gloo processes: a foreign optimizer with other weights for evaluation, below the wrappers of
parameters that ranks share out."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mp_optim import (
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    OptimizerConfig,
    ProcessGroups,
)
from support.as_rank import as_rank

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = ("fsdp2", "optim", "optim_grads", "no_shard")
CASES = [(layout, dtype) for layout in LAYOUTS for dtype in DTYPES]


class Free(torch.optim.Optimizer):
    """Schedule-Free SGD, in short: gradients are taken at ``y``, which is stored in the parameters;
    evaluated is an average ``x``."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.75) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": True, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            lr, beta, weight = group["lr"], group["beta"], 1 / (group["count"] + 1)
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.detach().clone())
                    param.lerp_(z, weight)
                    param.add_(param.grad, alpha=lr * (beta * (1 - weight) - 1))
                    z.sub_(param.grad, alpha=lr)
            group["count"] += 1

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True, lambda beta: 1 - beta)

    def _switch(self, to: bool, weight: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight(group["beta"]))
            group["train_mode"] = to


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).float().square().mean()


def built(layout: str, dtype: torch.dtype) -> tuple[Net, Any]:
    model, half = Net(dtype), dtype == torch.bfloat16
    config = OptimizerConfig(lr=0.1, bf16=half, clip_grad=0.0)

    def wrapped(params: Any) -> Any:
        if half:
            return Float16OptimizerWithFloat16Params(Free(params), config)
        return FP32Optimizer(Free(params), config)

    if layout == "fsdp2":
        fully_shard(model)
    if layout in ("fsdp2", "alone"):
        return model, wrapped(list(model.named_parameters()))
    names, params = zip(*model.named_parameters(), strict=True)
    config.use_distributed_optimizer = True
    config.data_parallel_sharding_strategy = layout
    optimizer = DistributedOptimizer(
        [{"params": list(params), "param_names": list(names)}],
        config,
        build=wrapped,
        process_groups=ProcessGroups(dp=dist.group.WORLD),
        model_chunks=[model],
    )
    return model, optimizer


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def perform(layout: str, dtype: torch.dtype) -> dict[str, Any]:
    model, optimizer = built(layout, dtype)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    found: dict[str, Any] = {"losses": [], "weights": []}

    def look() -> None:
        with torch.no_grad():
            found["losses"].append(model(x).item())
        found["weights"].append([whole(param) for param in model.parameters()])

    for _ in range(3):
        optimizer.train()
        look()
        for _ in range(2):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        look()
        optimizer.eval()
        look()
    found["modes"] = [group["train_mode"] for group in optimizer.param_groups]
    return found


def main(directory: Path) -> Any:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {case: perform(case[0], DTYPES[case[1]]) for case in CASES}
    return found


if __name__ == "__main__":
    as_rank(main)
