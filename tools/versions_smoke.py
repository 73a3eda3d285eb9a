"""What a first user does, in whatever Python and torch run this: settings of AdamW and the factory
train and resume with the same bits, by mp_optim's checkpoints and by torch's state-dict functions,
alone and under FSDP2 on two ranks. Prints a line for each, and fails at the first that does not.
"""

import importlib.util
import pkgutil
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mp_optim

SETTINGS: list[dict[str, object]] = [
    {},
    {"offload": 0.5, "state": "8bit"},
    {"offload": 1.0, "state": "4bit", "main_params": "remainder16"},
    {"offload": 1.0, "offload_mode": "overlap"},
    {"offload": 1.0, "offload_mode": "speculative", "max_grad_norm": 1.0},
]
Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
    return torch.nn.Sequential(*layers).bfloat16()


def torch_shaped(**settings: object) -> Pair:
    model = network()
    return model, mp_optim.AdamW(model.named_parameters(), lr=1e-2, **settings)


def megatron() -> Pair:
    model = network()
    config = mp_optim.OptimizerConfig(
        lr=1e-2, bf16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5
    )
    return model, mp_optim.get_megatron_optimizer(config, model)


def sharded() -> Pair:
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        # torch 2.6 alone cannot do without: its backward fails on a CPU
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    params = model.named_parameters()
    return model, mp_optim.AdamW(params, lr=1e-2, offload=0.5, max_grad_norm=1.0)


def train(pair: Pair, steps: Iterable[int]) -> float:
    model, optimizer = pair
    for step in steps:
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs.bfloat16()).float() - inputs[:, :4].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def resumes(make: Callable[[], Pair], folder: str, background: bool = False) -> str:
    pair = make()
    first = train(pair, range(1))
    train(pair, range(1, 30))
    save = mp_optim.checkpoint.save(folder, *pair, asynchronous=background)
    if background:
        save.wait()
    expected = train(pair, range(30, 60))
    other = make()
    mp_optim.checkpoint.load(folder, *other)
    assert train(other, range(30, 60)) == expected < first
    return f"{first:.3f} -> {expected:.4f}, resumes with the same bits"


def resumes_by_torch(make: Callable[[], Pair], full: bool) -> str:
    pair, other = make(), make()
    train(pair, range(30))
    options = StateDictOptions(full_state_dict=full)
    state = get_optimizer_state_dict(*pair, options=options)
    weights = {name: value.clone() for name, value in pair[0].state_dict().items()}
    other[0].load_state_dict(weights)
    set_optimizer_state_dict(*other, state, options=options)
    assert train(other, range(30, 60)) == train(pair, range(30, 60))
    return "resumes with the same bits"


def read_by_torch(folder: str) -> str:
    name = "model.0.weight"
    target = {name: torch.zeros(64, 16, dtype=torch.bfloat16)}
    version = (Path(folder) / "latest").read_text().strip()
    dcp.load(target, checkpoint_id=Path(folder) / version)
    assert target[name].count_nonzero() > 0
    return "reads the weights"


def rank(number: int, folder: str) -> None:
    torch.set_num_threads(1)
    if not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6: its FSDP2 asks for it
        torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()
        torch.cpu.Stream.wait_event = lambda self, event: None
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=2)
    said = resumes(sharded, f"{folder}/sharded")
    by_torch = resumes_by_torch(sharded, full=False)
    if number == 0:
        print(f"  FSDP2 on 2 ranks: {said}\n  FSDP2, torch's state dict: {by_torch}")
    dist.destroy_process_group()


def missing_names() -> list[str]:
    listed = Path(__file__).with_name("torch_names.txt").read_text().split()
    missing = []
    for name in listed:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing


def main() -> None:
    numpy = "with" if importlib.util.find_spec("numpy") else "without"
    print(f"  Python {platform.python_version()}, torch {torch.__version__}, {numpy} numpy")
    assert not missing_names(), missing_names()
    with tempfile.TemporaryDirectory() as folder:
        for number, settings in enumerate(SETTINGS):
            said = resumes(partial(torch_shaped, **settings), f"{folder}/{number}")
            print(f"  AdamW {settings or ''}: {said}")
        print(f"  get_megatron_optimizer: {resumes(megatron, f'{folder}/megatron')}")
        print(f"  saved in the background: {resumes(torch_shaped, f'{folder}/late', True)}")
        print(f"  torch's state dict: {resumes_by_torch(torch_shaped, full=True)}")
        print(f"  torch's dcp.load: {read_by_torch(f'{folder}/0')}", flush=True)
        if numpy == "with":
            torch.multiprocessing.spawn(rank, (folder,), nprocs=2)
        else:  # "Numpy is not available", from dist.all_gather_object and its like
            print("  FSDP2: not run; torch's own collectives of objects need numpy")
    backends = {row.backend for row in torch_shaped()[1].describe().rows}
    print(f"  steps by {', '.join(sorted(backends))}: all of it works")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Failed to initialize NumPy|torch.distributed is")
    main()
