#!/usr/bin/env python
"""Windows of a file past the page cache, as the optimizer's state would be read and written, in
turn with ``dd``, which does nothing else.

python tools/benchmark_disk.py --folder /mnt/nvme --size 8192      # on an idle machine
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro

from mp_optim.host.direct_file import PIECE, THREADS, DirectFile, Ticket

MIB = 1 << 20
PATTERNS = ("read", "write", "read and write")


@dataclass
class Options:
    """What to measure."""

    folder: Path = Path()
    """On the disk that is measured; what is made there is removed."""
    size: int = 2048
    """MiB of the file."""
    window: int = 64
    """MiB of a window; two are read and two written at once."""
    rounds: int = 5
    threads: int = THREADS
    """Of ours; ``dd`` has as many processes, half of them for each direction where it has both."""


def main(options: Options) -> None:
    size = options.size // options.window * options.window * MIB
    seconds: dict[tuple[str, str], list[float]] = {}
    with TemporaryDirectory(dir=options.folder) as folder:
        file = DirectFile(folder, size, options.threads)
        raw = Raw(Path(folder) / "raw", size, options.threads)
        print(file)
        with contextlib.closing(file):
            ours = Windows(file, options.window * MIB)
            for name, run in (("write", raw.run), ("write", ours.run)):
                run(name)  # blocks that were never written cost more the first time
            for _ in range(options.rounds):
                for pattern in PATTERNS:
                    for who, run in (("dd", raw.run), ("ours", ours.run)):
                        seconds.setdefault((pattern, who), []).append(timed(run, pattern))
    print("\n".join(table(seconds, size)))


def timed(run: Callable[[str], None], pattern: str) -> float:
    begin = time.perf_counter()
    run(pattern)
    return time.perf_counter() - begin


def table(seconds: dict[tuple[str, str], list[float]], size: int) -> Iterator[str]:
    """GB/s by median, and ours of dd's by the median of rounds."""
    yield "| pattern | dd, GB/s | ours, GB/s | ours of dd's |"
    yield "|---|---|---|---|"
    for pattern in PATTERNS:
        moved = size * (2 if pattern == "read and write" else 1)
        raw, ours = seconds[pattern, "dd"], seconds[pattern, "ours"]
        ratios = [a / b for a, b in zip(raw, ours, strict=True)]
        speeds = [moved / statistics.median(each) / 1e9 for each in (raw, ours)]
        yield (
            f"| {pattern} | {speeds[0]:.2f} | {speeds[1]:.2f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


class Windows:
    """Ours: every window of the file once, double-buffered."""

    def __init__(self, file: DirectFile, window: int) -> None:
        self._file = file
        self._offsets = range(0, file.num_bytes, window)
        memory = torch.ones(4 * window + PIECE, dtype=torch.uint8)
        begin = -memory.data_ptr() % PIECE
        self._buffers = memory[begin : begin + 4 * window].split(window)

    def run(self, pattern: str) -> None:
        under_way: list[list[Ticket]] = []
        for index, offset in enumerate(self._offsets):
            if len(under_way) == 2:
                for ticket in under_way.pop(0):
                    ticket.wait()
            come, go = self._buffers[index % 2], self._buffers[2 + index % 2]
            tickets = []
            if "read" in pattern:
                tickets.append(self._file.read_into(come, offset))
            if "write" in pattern:
                behind = self._offsets[index - len(self._offsets) // 2]
                tickets.append(self._file.write_from(go, behind))
            under_way.append(tickets)
        for ticket in [ticket for tickets in under_way for ticket in tickets]:
            ticket.wait()


class Raw:
    """``dd`` with direct access: processes that read or write their part of a file in order."""

    def __init__(self, path: Path, size: int, processes: int) -> None:
        self._path, self._size, self._processes = path, size, processes
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def run(self, pattern: str) -> None:
        kinds = pattern.split(" and ")
        processes = max(self._processes // len(kinds), 1)
        blocks = self._size // PIECE
        with contextlib.ExitStack() as running:
            for kind in kinds:
                for index in range(processes):
                    begin = blocks * index // processes
                    count = blocks * (index + 1) // processes - begin
                    command = self._command(kind, begin, count)
                    running.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def _command(self, kind: str, begin: int, count: int) -> list[str]:
        common = ["dd", f"bs={PIECE}", f"count={count}"]
        if kind == "read":
            ends = [f"if={self._path}", "of=/dev/null", f"skip={begin}", "iflag=direct"]
        else:
            ends = ["if=/dev/zero", f"of={self._path}", f"seek={begin}", "oflag=direct"]
        return [*common, *ends, "conv=notrunc"]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
