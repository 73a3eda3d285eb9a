"""``python -m lab.gpu.run PART SIZES``: one part, in this process; prints its section as JSON."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.section import Section
from lab.gpu import agreement, hybrid, places, speed, waiting
from lab.gpu import saves as saving
from lab.gpu.parts import Sizes, run_here


def backend(sizes: Sizes) -> Section:
    """Which kernels everybody gets."""
    return agreement.chosen(torch.device(sizes.device))


def bits(sizes: Sizes) -> Section:
    """The same bits in every place."""
    return agreement.bits(torch.device(sizes.device))


def syncs(sizes: Sizes) -> Section:
    """Host synchronisations in a step."""
    return waiting.synchronisations(torch.device(sizes.device))


def rates(sizes: Sizes) -> Section:
    """What the memory and the bus can do."""
    return speed.rates(_rate(sizes), sizes.rounds)


def kernels(sizes: Sizes) -> Section:
    """Updates and sums."""
    return speed.kernels(_rate(sizes), sizes.params, sizes.rounds)


def steps(sizes: Sizes) -> Section:
    """Full steps."""
    return speed.steps(_rate(sizes), sizes.params, sizes.rounds)


def many(sizes: Sizes) -> Section:
    """Many small tensors."""
    return speed.many(_rate(sizes), sizes.params // 10, sizes.rounds)


def verdicts(sizes: Sizes) -> Section:
    """Who reads the verdict, and how long that takes."""
    return waiting.verdicts(_rate(sizes), sizes.params // 10, sizes.rounds)


def hybrids(sizes: Sizes) -> Section:
    """Part of the model on the host."""
    return hybrid.fractions(torch.device(sizes.device), sizes.hybrid_params, sizes.rounds)


def places_of_state(sizes: Sizes) -> Section:
    """State in host memory, stepped there, streamed, or both."""
    return places.places(_rate(sizes), sizes.hybrid_params, sizes.rounds)


def saves(sizes: Sizes) -> Section:
    """Saves of what lies on the device."""
    return saving.saves(torch.device(sizes.device), sizes.hybrid_params, sizes.rounds)


def _rate(sizes: Sizes) -> speed.Rate:
    return speed.Rate(torch.device(sizes.device))


if __name__ == "__main__":
    print(json.dumps(run_here(sys.argv[1], Sizes(**json.loads(sys.argv[2])))))
