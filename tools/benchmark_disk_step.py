#!/usr/bin/env python
"""AdamW with its state on a disk: how fast a step is beside what the disk can do, how much of the
disk's time backward hides, and that host memory holds only windows.

python tools/benchmark_disk_step.py speed --folder /mnt/nvme     # on an idle machine
python tools/benchmark_disk_step.py hidden --folder /mnt/nvme
python tools/benchmark_disk_step.py limit --folder /mnt/nvme --window 32 --mode overlap

``speed`` takes steps in turn with processes of ``dd`` that read a file of the same size and write
one, with direct access, as a step does. ``hidden`` takes steps in each ``offload_mode`` after a
backward that takes as long as a step of ``sync``: how long ``step()`` takes and waits for the disk,
and which share of what the disk moves is moved behind backward. ``limit`` runs under a limit of
memory, and again in memory without one, each in a process of its own, and compares the parameters;
under the limit each backward takes as long as the step before it, and the share moved behind it is
said, too.
"""

from __future__ import annotations

import hashlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import tyro
from benchmark_disk import Raw
from measuring.kernels import require_kernels
from torch import Tensor, nn

from mp_optim import HybridDeviceOptimizer, OptimizerConfig, get_megatron_optimizer
from mp_optim.host.direct_file import Ticket
from mp_optim.offload.timeline import WAIT_DISK, StepTimeline

MIB = 1 << 20
LAYER = 4 << 20
"""Elements of each parameter."""


@dataclass
class Options:
    """What to do."""

    what: tyro.conf.Positional[Literal["speed", "hidden", "limit", "run"]]
    """``run`` is one of the two processes of ``limit``."""
    folder: Path = Path()
    """On the disk; what is made there is removed."""
    state: int = 2048
    """MiB of main params and state, of which a parameter has 12 bytes."""
    window: int = 64
    """MiB of a window, of which five are in host memory."""
    rounds: int = 5
    """Of ``speed`` and ``hidden``."""
    mode: Literal["sync", "overlap", "speculative"] = "sync"
    """``offload_mode`` of ``limit``."""
    steps: int = 20
    """Of ``limit``."""
    memory: int = 256
    """MiB that ``limit`` allows beyond the model and its gradients; 0: as much as there is, and
    nothing on the disk."""
    threads: int = 4
    """Processes of ``dd``."""


def main(options: Options) -> None:
    """Print what was asked for."""
    require_kernels()
    ways = {"speed": speed, "hidden": hidden, "limit": limit, "run": run}
    ways[options.what](options)


class Training:
    """A model whose gradients are there, and its optimizer."""

    def __init__(self, options: Options, dtype: torch.dtype) -> None:
        count = max(1, options.state * MIB // 12 // LAYER)
        torch.manual_seed(0)
        self.model = nn.ParameterList(
            nn.Parameter(torch.randn(LAYER, dtype=dtype)) for _ in range(count)
        )
        for param in self.model:
            param.grad = torch.zeros_like(param)
        self._coming = torch.zeros(LAYER, dtype=dtype)
        self._generator = torch.Generator().manual_seed(1)
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

    def new_gradients(self, seconds: float = 0.0) -> None:
        """Others, in the same memory, by a backward of each parameter; it takes so long in all."""
        for param in self.model:
            param.grad.zero_()
            self._coming.normal_(generator=self._generator)
            torch.autograd.backward(param, self._coming)
            time.sleep(seconds / len(self.model))

    @property
    def hybrid(self) -> HybridDeviceOptimizer:
        """What steps what is offloaded."""
        (part,) = self.optimizer.chained_optimizers
        return part.optimizer

    def digest(self) -> str:
        """Of all parameters."""
        found = hashlib.sha256()
        for param in self.model:
            found.update(param.detach().view(torch.uint8).numpy())
        return found.hexdigest()[:16]


def speed(options: Options) -> None:
    """Steps in turn with ``dd``."""
    seconds: dict[str, list[float]] = {"dd": [], "step": []}
    with TemporaryDirectory(dir=options.folder) as folder:
        training = Training(options, torch.float32)
        training.build(folder)
        size = 12 * LAYER * len(training.model)
        raw = Raw(Path(folder) / "raw", size, options.threads)
        raw.run("write")  # blocks that were never written cost more the first time
        training.optimizer.step()
        for _ in range(options.rounds):
            seconds["dd"].append(timed(lambda: raw.run("read and write")))
            seconds["step"].append(timed(training.optimizer.step))
    metrics = training.optimizer.metrics()
    print("\n".join(speed_table(seconds, size)))
    print(
        f"of the last step: {metrics['host_ms']:.0f} ms of arithmetic, "
        f"{metrics['disk_wait_ms']:.0f} ms of waiting for the disk"
    )


def hidden(options: Options) -> None:
    """Steps in each mode, after a backward as long as a step of ``sync``."""
    print("| offload_mode | step, ms | of it waiting for the disk, ms | moved during backward |")
    print("|---|---|---|---|")
    seconds = 0.0
    for mode in ("sync", "overlap", "speculative"):
        steps, waits, shares = [], [], []
        with TemporaryDirectory(dir=options.folder) as folder:
            training = Training(options, torch.bfloat16)
            training.build(folder, mode)
            moved, part = Moved(training), training.hybrid
            for _ in range(2 + options.rounds):  # memory is new in the first, the order is learnt
                took, share = moved.step(training, seconds)
                steps.append(took)
                waits.append(waited_in_step(part.timeline))
                shares.append(share)
        step, wait, share = (statistics.median(each[2:]) for each in (steps, waits, shares))
        if mode == "sync":
            seconds = step
        print(f"| {mode} | {1e3 * step:.1f} | {1e3 * wait:.1f} | {share:.0%} |")


class Moved:
    """Transfers of a state file: their tickets, and bytes."""

    def __init__(self, training: Training) -> None:
        file = training.hybrid.stepper.host_part.settings.state_file
        self.transfers: list[tuple[Ticket, int]] = []
        for name in ("read_into", "write_from"):
            setattr(file, name, self._noting(getattr(file, name)))

    def _noting(self, move: Callable[[Tensor, int], Ticket]) -> Callable[[Tensor, int], Ticket]:
        def noted(memory: Tensor, offset: int) -> Ticket:
            ticket = move(memory, offset)
            self.transfers.append((ticket, memory.numel()))
            return ticket

        return noted

    def step(self, training: Training, seconds: float) -> tuple[float, float]:
        """Seconds of a step after a backward that takes ``seconds``, and which share of the bytes
        that the disk moves for it is moved by the end of backward."""
        self.transfers.clear()
        training.new_gradients(seconds)
        early = sum(size for ticket, size in self.transfers if ticket.done())
        took = timed(training.optimizer.step)
        return took, early / max(sum(size for _, size in self.transfers), 1)


def waited_in_step(timeline: StepTimeline) -> float:
    """Seconds that the last ``step()`` waited for the disk."""
    spans = [span for span in timeline.last if span.stage == WAIT_DISK]
    return sum(max(0.0, span.end - max(span.start, timeline.began)) for span in spans)


def timed(run: object) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    run()  # type: ignore[operator]
    return time.perf_counter() - begin


def speed_table(seconds: dict[str, list[float]], size: int) -> Iterator[str]:
    """GB/s in both directions together by median; the step of dd by the median of rounds."""
    rates = {who: 2 * size / statistics.median(each) / 1e9 for who, each in seconds.items()}
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    yield "| state, GB | dd, GB/s | step, GB/s | step of dd |"
    yield "|---|---|---|---|"
    yield (
        f"| {size / 1e9:.2f} | {rates['dd']:.2f} | {rates['step']:.2f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def limit(options: Options) -> None:
    """A run under the limit, and one in memory.

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
    """Print the digest of the parameters, and what memory was used beyond the model's."""
    training = Training(options, torch.bfloat16)
    training.new_gradients()  # what backward needs once is there
    before = {name: status(name) for name in ("RssAnon", "VmData")}
    if options.memory:
        allowed = before["VmData"] + options.memory * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.RLIM_INFINITY))
    most, took, shares = 0, 0.0, []
    with TemporaryDirectory(dir=options.folder) as folder:
        training.build(folder if options.memory else None, options.mode)
        moved = Moved(training) if options.memory else None
        for _ in range(options.steps):
            if moved is None:
                training.new_gradients()
                training.optimizer.step()
            else:
                took, share = moved.step(training, took)
                shares.append(share)
            most = max(most, status("RssAnon") - before["RssAnon"])
        left = os.listdir(folder)
    said = ""
    if shares:
        said = f", {statistics.median(shares):.1%} of the disk's bytes moved during backward"
    print(
        f"{training.digest()}: {options.steps} steps of {options.state} MiB of state, "
        f"limit {options.memory or 'none'}: at most {most / MIB:.0f} MiB beyond model and "
        f"gradients, {len(left)} files{said}"
    )


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text().split(f"\n{name}:")[1]
    return int(text.split()[0]) * 1024


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
