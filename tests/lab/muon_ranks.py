"""What Muon's products and exchanges cost each rank where ranks share every matrix by rows. Work
and bytes are those of the plans that ranks make; times are a model, nothing is measured. Prints
markdown, by default what docs/benchmarks/muon_ranks.md shows.

$ python tests/lab muon-ranks
$ python tests/lab muon-ranks --teraflops 300 --gigabytes 40      # your own machine
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Shard

from mp_optim.core.tensor_layout import MatrixParts, parts_on_mesh
from mp_optim.muon.matrix_exchange import ExchangePlan, newton_schulz_flops, plan_exchange

STEPS, WIDTH = 5, 2
"""Newton-Schulz steps, and bytes of an element that travels (bfloat16)."""
MODELS: dict[str, list[tuple[int, ...]]] = {
    "1B dense (16 layers of width 2048, 8192 inside)": [
        *[(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)] * 16,
        *[(8192, 2048), (8192, 2048), (2048, 8192)] * 16,
    ],
    "OLMoE 7B (16 layers of width 2048, 64 experts of 1024)": [
        *[(2048, 2048)] * 64,
        *[(64, 2048, 2048), (64, 2048, 1024)] * 16,
        *[(64, 2048)] * 16,
    ],
}
"""Shapes of hidden matrices and stacks of them."""


@dataclass
class Options:
    """What to model."""

    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 64)
    teraflops: float = 400.0
    """Of a rank's products in bfloat16, 10^12 operations a second: what is reached, not a peak."""
    gigabytes: float = 200.0
    """10^9 bytes a second that a rank sends, to all others together."""


def sent(found: ExchangePlan, params: Sequence[MatrixParts], rank: int) -> int:
    """Bytes that a rank sends: its parts to owners, and owners' results to the others."""
    elements = 0
    for (param, matrix), owner in zip(found.items, found.owners, strict=True):
        sizes = params[param].sizes[matrix]
        elements += sum(sizes) - sizes[rank] if owner == rank else sizes[rank]
    return elements * WIDTH


def row(shapes: Sequence[tuple[int, ...]], ranks: int, options: Options) -> str:
    """A line of the table."""
    params = []
    for shape in shapes:
        parts = parts_on_mesh(shape, (Shard(len(shape) - 2),), (0,), (ranks,), (0,))
        assert parts is not None
        params.append(parts)
    flops = tuple(newton_schulz_flops(p.rows, p.columns, STEPS) for p in params)
    found = plan_exchange(tuple(params), flops, (0,) * ranks, WIDTH)
    loads = found.loads(ranks)
    most, total = max(loads), sum(loads)
    travels = max(sent(found, params, rank) for rank in range(ranks))
    work = most / options.teraflops / 1e9
    way = travels / options.gigabytes / 1e6
    hidden = max(work, way) + min(work, way) / len(found.batches)
    before = total / options.teraflops / 1e9
    return (
        f"| {ranks} | {most / 1e12:.2f} | {most * ranks / total:.3f} | {travels / 1e6:.0f} | "
        f"{work:.1f} | {way:.1f} | {hidden:.1f} | {before:.1f} |"
    )


def main(options: Options) -> int:
    print(
        f"Modelled, not measured: {options.teraflops:g} TFLOP/s of products in bfloat16 and "
        f"{options.gigabytes:g} GB/s\nsent by each rank, {STEPS} Newton-Schulz steps. Work and "
        "bytes are exact.\n"
    )
    for name, shapes in MODELS.items():
        print(f"{name}:\n")
        print(
            "| ranks | TFLOP of the busiest rank | times ranks / all | MB it sends | ms of work | "
            "ms of sending | ms overlapped | ms if each did all the work |\n|" + "---|" * 8
        )
        for ranks in options.ranks:
            print(row(shapes, ranks, options))
        print()
    return 0
