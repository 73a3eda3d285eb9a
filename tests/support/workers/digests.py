"""Three gloo processes with equal optimizers: digests by all ranks and by two of them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mp_optim
from support.as_rank import as_rank


def trained() -> mp_optim.AdamW:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))).bfloat16()
    optimizer = mp_optim.AdamW(model.named_parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def main(_folder: Path) -> dict[str, Any]:
    two = dist.new_group([0, 1])
    is_in_two = dist.get_rank() < 2
    optimizer, first = trained(), trained()
    found = {"all": optimizer.step_digest(sample=1).value}
    if is_in_two:
        found["two after all"] = optimizer.step_digest(sample=1, process_group=two).value
        found["two first"] = first.step_digest(sample=1, process_group=two).value
    again = optimizer.step_digest(sample=1)
    found |= {"all after two": again.value, "all at last": first.step_digest(sample=1).value}
    return {"values": found, "bytes": again.bytes_read}


if __name__ == "__main__":
    as_rank(main)
