"""Three gloo processes: one and three ranks load an FSDP2 checkpoint of two."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mp_optim
from support.as_rank import as_rank

warnings.filterwarnings("ignore")

ODD, ROWS = ((33, 16), (5, 33), (33,)), ((9, 256), (7, 2, 128), (4, 768))
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "FP32": (ODD, {}),
    "remainders of 16 bits": (ODD, {"main_params": "remainder16"}),
    "remainders of 8 bits, bf16": (ODD, {"state": "bf16", "main_params": "remainder8"}),
    "half on the host": (ODD, {"state": "bf16", "main_params": "remainder16", "offload": 0.5}),
    "8 bits, rows of blocks": (ROWS, {"state": "8bit", "main_params": "remainder16"}),
    "4 bits, rows of blocks": (ROWS, {"state": "4bit"}),
    "8 bits": (ODD, {"state": "8bit", "main_params": "remainder16"}),
    "4 bits": (ODD, {"state": "4bit"}),
}


class Model(nn.Module):
    def __init__(self, shapes: Any, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.held = nn.ParameterList(torch.randn(shape).bfloat16() for shape in shapes)

    def forward(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return sum((held * torch.randn(held.shape).bfloat16()).sum() for held in self.held)  # type: ignore[return-value]


def build(case: str, mesh: DeviceMesh, seed: int) -> tuple[nn.Module, Any]:
    shapes, settings = CASES[case]
    model = Model(shapes, seed)
    fully_shard(model, mesh=mesh)
    optimizer = mp_optim.AdamW(model.named_parameters(), lr=1e-2, **settings)
    for step in range(3):
        optimizer.zero_grad()
        model(10 * seed + step).backward()
        optimizer.step()
    return model, optimizer


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = dict(model.state_dict())
    for slot in optimizer.stack.slots():
        for key, value in optimizer.stack.full_slot_state(slot).items():
            found[f"{slot}.{key}"] = value
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in found.items()
    }


def load(case: str, mesh: DeviceMesh, folder: Path, saved: Any) -> Any:
    target = build(case, mesh, 2)
    group = mesh.get_group()
    try:
        mp_optim.checkpoint.load(folder, *target, process_group=group)
    except ValueError as error:
        mp_optim.checkpoint.load(folder, *target, process_group=group, convert=True)
        return str(error)
    found = whole(*target)
    return found.keys() == saved.keys() and all(
        torch.equal(value, found[name]) for name, value in saved.items()
    )


def main(folder: Path) -> Any:
    rank = dist.get_rank()
    one, two, three = (DeviceMesh("cpu", list(range(size))) for size in (1, 2, 3))
    found = {}
    for case in CASES:
        saved: Any = None
        if rank < 2:
            source = build(case, two, 1)
            saved = whole(*source)
            mp_optim.checkpoint.save(folder / case, *source, process_group=two.get_group())
        told = [saved]
        dist.broadcast_object_list(told, src=0)
        found[f"{case}, on three"] = load(case, three, folder / case, told[0])
        if rank == 0:
            found[f"{case}, on one"] = load(case, one, folder / case, told[0])
    return found


if __name__ == "__main__":
    as_rank(main)
