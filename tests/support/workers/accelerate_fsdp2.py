"""accelerate with FSDP2 clips, saves with ``save_state`` and resumes to the bit with
``load_state``."""

import sys

import torch
from accelerate.utils import DistributedType
from torch import nn

import mp_optim
from support.programs import program

HALF = 10


def losses(folder: str, resume: bool) -> list[float]:
    accelerator = program("examples/accelerate_fsdp2").sharding_accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).bfloat16()
    optimizer = mp_optim.AdamW(model.parameters(), lr=1e-2, offload=0.5, state="8bit")
    model, optimizer = accelerator.prepare(model, optimizer)
    # prepare() resets the FSDP type on a CPU.
    vars(accelerator.state)["distributed_type"] = DistributedType.FSDP
    if resume:
        accelerator.load_state(folder)
    result = []
    for step in range(HALF if resume else 0, 2 * HALF):
        if step == HALF and not resume:
            accelerator.save_state(folder)
        seed = 2 * step + accelerator.process_index
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), inputs[:, :4])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        result.append(loss.item())
    return result


def main(folder: str) -> None:
    whole = losses(folder, False)
    assert losses(folder, True) == whole[HALF:] and whole[-1] < 0.5 * whole[0]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print("resumed to the bit")


if __name__ == "__main__":
    main(sys.argv[1])
