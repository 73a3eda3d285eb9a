"""``python -m lab.gpu.run PART SIZES``: one part, in this process; prints its section as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from benchmarks.section import Section
from lab.gpu import agreement, hybrid, places, speed, waiting
from lab.gpu import door as doors
from lab.gpu import saves as saving
from lab.gpu.parts import Sizes, run_here
from support.accelerator.simulation import device_at
from support.accelerator.stand_in import simulated_accelerator


def door(sizes: Sizes) -> Section:
    """What the package asks of the accelerator."""
    return doors.door(torch.device(sizes.device))


def backend(sizes: Sizes) -> Section:
    """Which kernels everybody gets."""
    return agreement.chosen(torch.device(sizes.device))


def bits(sizes: Sizes) -> Section:
    """The same bits in every place."""
    device = torch.device(sizes.device)
    return agreement.bits(device, agreement.STEPS if device.type == "cuda" else sizes.rounds)


def ranks(sizes: Sizes) -> Section:
    """Process groups change no bit; only a GPU has its own collectives."""
    device = torch.device(sizes.device if sizes.device.startswith("cuda") else "cpu")
    return agreement.ranks(device, agreement.STEPS if device.type == "cuda" else sizes.rounds)


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


def main(name: str, sizes: Sizes) -> None:
    """Print a part's section."""
    if sizes.device != "simulated":
        print(json.dumps(run_here(name, sizes)))
        return
    with simulated_accelerator():
        section = run_here(name, replace(sizes, device=str(device_at(1))))
    print(json.dumps(section))


if __name__ == "__main__":
    main(sys.argv[1], Sizes(**json.loads(sys.argv[2])))
