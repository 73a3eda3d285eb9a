"""Two gloo processes: Muon over the buffers of Megatron's DDP, compared with one process."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch import nn

from mp_optim.apps import megatron
from support.as_rank import as_rank

warnings.filterwarnings("ignore")
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.odd = nn.Linear(16, 24, bias=False)
        self.norm = nn.LayerNorm(16)
        self.bfloat16()
        self.norm.float()


def wrapped(model: Net, splits: bool = True) -> Any:
    for layer in (model.first, model.second):
        layer.weight.is_managed_by_layer_wise_optimizer = True  # type: ignore[assignment]
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=splits, bucket_size=512)
    return DistributedDataParallel(model.config, ddp, model)


def config(optimizer: str = "dist_muon") -> OptimizerConfig:
    return OptimizerConfig(optimizer=optimizer, lr=1e-2, bf16=True, weight_decay=0.1, clip_grad=0.5)


def grads(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for param in model.parameters():
        values = torch.randn(param.shape).to(param.dtype)
        if hasattr(param, "main_grad"):
            param.main_grad.copy_(values)
        else:
            param.main_grad = values


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    norms = []
    for step in steps:
        grads(model, step)
        norms.append(float(optimizer.step()[1]))
    return norms


def shapes(optimizer: Any) -> dict[str, list[int]]:
    """Return the shape of this rank's shard by parameter name."""
    of_each = {}
    for part in optimizer.stack.chained_optimizers:
        for whole, owned in zip(part.param_groups, part.shards.param_groups, strict=True):
            for name, tensor in zip(whole.get("param_names", ()), owned["params"], strict=True):
                of_each[name.removeprefix("module.")] = list(tensor.shape)
    return of_each


def refusal() -> str:
    try:
        megatron.get_megatron_optimizer(config(), [wrapped(Net(), splits=False)])
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path) -> Any:
    parallel_state.initialize_model_parallel()
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Net()
    model = wrapped(copy.deepcopy(plain))
    alone = megatron.get_megatron_optimizer(config("muon"), [plain])
    optimizer = megatron.get_megatron_optimizer(config(), [model])
    norms = [
        train(net, stepper, range(STEPS)) for net, stepper in ((plain, alone), (model, optimizer))
    ]
    file = str(folder / f"layer_wise_{rank}.pt")
    optimizer.save_state_dict_to_file(file)
    values = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(STEPS, STEPS + 1))
    again = wrapped(Net())
    again.load_state_dict(values)
    resumed = megatron.get_megatron_optimizer(config(), [again])
    resumed.load_state_dict_from_file(file)
    train(again, resumed, range(STEPS, STEPS + 1))
    result = {
        "norms": norms,
        "plain": plain.state_dict(),
        "sharded": {k.removeprefix("module."): v for k, v in values.items()},
        "gone on": model.state_dict(),
        "resumed": again.state_dict(),
        "shapes": shapes(optimizer),
        "refusal": refusal(),
    }
    return result


if __name__ == "__main__":
    as_rank(main)
