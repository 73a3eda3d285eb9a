#!/usr/bin/env python
"""AdamW with its state on a disk: the rate of a step next to that of the disk, and its memory.

python tools/benchmark_disk.py speed --folder /mnt/nvme     # on an idle machine
python tools/benchmark_disk.py limit --folder /mnt/nvme --window 32 --mode overlap

``speed`` takes steps in turn with processes of ``dd`` that read a file of the same size and write
one, with direct access, as a step does. ``limit`` trains under a limit of memory, and again in
memory without one, each in a process of its own, and compares the parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import tyro
from measuring.kernels import require_kernels
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.host.direct_file import PIECE

MIB = 1 << 20
LAYER = 4 << 20
"""Elements of each parameter."""


@dataclass
class Options:
    """The measurement and its sizes."""

    what: tyro.conf.Positional[Literal["speed", "limit", "run"]]
    """``run`` is one of the two processes of ``limit``."""
    folder: Path = Path()
    """On the disk; files that are made there are removed."""
    state: int = 2048
    """MiB of main params and state, of which a parameter has 12 bytes."""
    window: int = 64
    """MiB of a window, of which five are in host memory."""
    rounds: int = 5
    """Of ``speed``."""
    mode: Literal["sync", "overlap", "speculative"] = "sync"
    """``offload_mode`` of ``limit``."""
    steps: int = 20
    """Of ``limit``."""
    memory: int = 256
    """MiB that ``limit`` allows besides the model and its gradients; 0: no limit, no disk."""
    threads: int = 4
    """Processes of ``dd``."""


class Training:
    """A model with gradients, and its optimizer."""

    def __init__(self, options: Options, dtype: torch.dtype) -> None:
        count = max(1, options.state * MIB // 12 // LAYER)
        torch.manual_seed(0)
        self.model = nn.ParameterList()
        for _ in range(count):
            self.model.append(nn.Parameter(torch.randn(LAYER, dtype=dtype)))
            self.model[-1].grad = torch.zeros(LAYER, dtype=dtype)
        self._incoming = torch.zeros(LAYER, dtype=dtype)
        self._options, self._dtype = options, dtype

    def build(self, folder: str | None, mode: str = "sync") -> None:
        """Make the optimizer, with its state in a folder or in memory."""
        window = self._options.window * MIB
        disk = {"optimizer_state_path": folder, "stream_window_bytes": window, "offload_mode": mode}
        config = OptimizerConfig(
            lr=1e-3,
            bf16=self._dtype == torch.bfloat16,
            clip_grad=0.0,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
            **(disk if folder else {}),
        )
        self.optimizer = get_megatron_optimizer(config, self.model)

    def backward(self) -> None:
        """Give each parameter a new gradient in the same memory."""
        for param in self.model:
            param.grad.zero_()
            torch.autograd.backward(param, self._incoming.normal_())

    def digest(self) -> str:
        """Return a digest of all parameters."""
        found = hashlib.sha256()
        for param in self.model:
            found.update(param.detach().view(torch.uint8).numpy())
        return found.hexdigest()[:16]


def speed(options: Options) -> None:
    """Print GB/s in both directions of steps and of ``dd``, in turn."""
    seconds: dict[str, list[float]] = {"dd": [], "step": []}
    with TemporaryDirectory(dir=options.folder) as folder:
        training = Training(options, torch.float32)
        training.build(folder)
        size = 12 * LAYER * len(training.model)
        raw = Path(folder) / "raw"
        with raw.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        copy_by_dd(raw, size, options.threads)  # the first write of a block costs more
        training.optimizer.step()
        for _ in range(options.rounds):
            seconds["dd"].append(timed(lambda: copy_by_dd(raw, size, options.threads)))
            seconds["step"].append(timed(training.optimizer.step))
    rates = {name: 2 * size / statistics.median(each) / 1e9 for name, each in seconds.items()}
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    print("| state, GB | dd, GB/s | step, GB/s | step of dd |\n|---|---|---|---|")
    print(
        f"| {size / 1e9:.2f} | {rates['dd']:.2f} | {rates['step']:.2f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )
    metrics = training.optimizer.metrics()
    print(f"last step: {metrics['host_ms']:.0f} ms of arithmetic, ", end="")
    print(f"{metrics['disk_wait_ms']:.0f} ms of waiting for the disk")


def copy_by_dd(path: Path, size: int, processes: int) -> None:
    """Read a file and write it by processes with direct access, both at once, in order."""
    processes, blocks = max(processes // 2, 1), size // PIECE
    ways = (
        (f"if={path}", "of=/dev/null", "skip", "iflag=direct"),
        ("if=/dev/zero", f"of={path}", "seek", "oflag=direct"),
    )
    with contextlib.ExitStack() as running:
        for source, target, begin, flag in ways:
            for index in range(processes):
                first = blocks * index // processes
                count = blocks * (index + 1) // processes - first
                command = ["dd", f"bs={PIECE}", f"count={count}", source, target]
                command += [f"{begin}={first}", flag, "conv=notrunc"]
                running.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def limit(options: Options) -> None:
    """Train under the limit and in memory.

    Raises:
        SystemExit: parameters differ.
    """
    digests = []
    for memory in (options.memory, 0):
        said = asdict(options) | {"memory": memory}
        del said["what"]
        flags = [f"--{name}={value}" for name, value in said.items()]
        command = [sys.executable, __file__, "run", *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout, end="")
        digests.append(done.stdout.split()[0])
    if len(set(digests)) > 1:
        raise SystemExit("the parameters differ")
    print("the same parameters")


def run(options: Options) -> None:
    """Train, and print the digest of the parameters and the memory used besides the model's."""
    training = Training(options, torch.bfloat16)
    training.backward()  # memory that backward needs once is allocated
    before = {name: status(name) for name in ("RssAnon", "VmData")}
    if options.memory:
        allowed = before["VmData"] + options.memory * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
    torch.manual_seed(1)
    most = 0
    with TemporaryDirectory(dir=options.folder) as folder:
        training.build(folder if options.memory else None, options.mode)
        for _ in range(options.steps):
            training.backward()
            training.optimizer.step()
            most = max(most, status("RssAnon") - before["RssAnon"])
    print(
        f"{training.digest()}: {options.steps} steps of {options.state} MiB of state, "
        f"limit {options.memory or 'none'}: at most {most / MIB:.0f} MiB besides the model"
    )


def status(name: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text().split(f"\n{name}:")[1]
    return int(text.split()[0]) * 1024


def main(options: Options) -> None:
    """Print the measurement that was asked for."""
    require_kernels()
    {"speed": speed, "limit": limit, "run": run}[options.what](options)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
