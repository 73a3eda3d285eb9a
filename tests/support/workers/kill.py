"""Train and save a tiny model in a forked process until it is killed.

Each line of stdin starts one process: a folder, "sync" or "async", and the number of kept versions.
"""

import hashlib
import os
import random
import sys
import tempfile

import torch
from torch import nn

from mp_optim import OptimizerConfig, checkpoint, get_megatron_optimizer


def build() -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()
    return model, get_megatron_optimizer(OptimizerConfig(bf16=True, lr=1e-2, clip_grad=0.0), model)


def train_step(model: nn.Module, optimizer: object, step: int) -> None:
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(step * 100 + index)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def write(model: nn.Module, optimizer: object, step: int) -> None:
    """Write weights or state in a random way for this step."""
    draw = random.Random(f"write {step}")
    param = draw.choice(list(model.parameters()))
    state = optimizer.state[param]
    way = draw.choice(("none", "data", "storage", "moment", "state memory", "swap", "reset"))
    if way == "data":
        param.data.mul_(0.5)
    elif way == "storage":
        param.detach().view(torch.int16).numpy()[:2] = 0x3F80  # The bits of 1.0 in bfloat16.
    elif way == "moment":
        state["exp_avg"].mul_(0.5)
    elif way == "state memory":
        state["exp_avg_sq"].data = state["exp_avg_sq"].data * 2
    elif way == "swap":
        param.data = param.data.clone().neg_()
    elif way == "reset":
        del optimizer.state[param]


def digest(model: nn.Module, optimizer: object) -> str:
    found = hashlib.sha256()
    for tensor in (
        *model.parameters(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ):
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def say(*words: object) -> None:
    """Write a line in one system call, so that a killed process leaves no half line."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train_and_save(root: str, asynchronous: bool, keep: int) -> None:
    model, optimizer = build()
    step = checkpoint.load(root, model, optimizer)["step"] if checkpoint.versions(root) else 0
    while True:
        torch.set_flush_denormal(step % 3 == 1)
        train_step(model, optimizer, step)
        torch.set_flush_denormal(False)
        step += 1
        write(model, optimizer, step)
        say("begin", step, digest(model, optimizer))
        handle = checkpoint.save(
            root, model, optimizer, extra={"step": step}, asynchronous=asynchronous, keep=keep
        )
        if asynchronous:
            handle.wait()
        say("end", step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Imports and kernel proofs run before the first fork.
    with tempfile.TemporaryDirectory() as warm:
        checkpoint.save(warm, *build())
        checkpoint.load(warm, *build())
    for line in sys.stdin:
        child = os.fork()  # Importing torch takes longer than all later work.
        if not child:
            root, mode, keep = line.split()
            train_and_save(root, mode == "async", int(keep))
        say("child", child)
        os.waitpid(child, 0)
        say("gone")
