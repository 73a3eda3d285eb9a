"""``mp-optim doctor``: lists the kernels, threads and accelerators of this machine. The command
needs only torch."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence

import torch

from mp_optim.config.rules import BACKENDS, CAPABILITIES, Capability
from mp_optim.host.accelerator import CUDA
from mp_optim.kernels import choose_backend, proof_of
from mp_optim.kernels.native_library import ENVIRONMENT, describe_threads, native_library
from mp_optim.mixed_precision.description import columns

_AMD = "AMD: compiles, never run; the rows of backends state the proof on this GPU"


def _machine() -> list[list[str]]:
    library, rocm = native_library(), torch.version.hip
    native = (
        f"{library.level} of {', '.join(library.levels)}"
        if library.handle is not None
        else f"none: {library.why}"
    )
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    memory = "unknown"
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        memory = f"{pages * page / 2**30:.1f} GiB"
    accelerators = [["accelerators", "none that torch can use"]]
    pinned = "not needed without an accelerator"
    if CUDA.is_available():
        accelerators = []
        for index, properties in enumerate(CUDA.devices()):
            size = f"{properties.total_memory / 2**30:.1f} GiB"
            capability = f"compute capability {properties.major}.{properties.minor}"
            accelerators.append([f"cuda:{index}", f"{properties.name}, {size}, {capability}"])
        try:
            block = torch.empty(1 << 20, dtype=torch.uint8, device="cpu", pin_memory=True)
            pinned = "works" if block.is_pinned() else "does not work"
        except RuntimeError as error:
            pinned = f"does not work: {str(error).splitlines()[0]}"
    return [
        ["python", platform.python_version()],
        ["torch", torch.__version__],
        ["CUDA of torch", str(getattr(torch.version, "cuda", None) or "none: a CPU build")],
        *([["ROCm of torch", f"{rocm}; {_AMD}"]] if rocm else []),
        ["machine", f"{platform.system()} {platform.machine()}"],
        ["native kernels", native],
        [ENVIRONMENT, os.environ.get(ENVIRONMENT) or "not set"],
        ["cores for this process", f"{cores} of {os.cpu_count()}"],
        ["threads", describe_threads()],
        ["threads of torch", str(torch.get_num_threads())],
        ["memory", memory],
        *accelerators,
        ["pinned memory", pinned],
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Load and step every backend, print a report, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="mp-optim doctor",
        description="What this machine can do for the optimizer: native kernels, threads, "
        "accelerators; and each backend with a step taken as proof, or why it is not usable.",
    )
    parser.parse_args(arguments)
    devices = [torch.device("cpu"), *([CUDA.current()] if CUDA.is_available() else [])]
    chosen = [(device, choose_backend("auto", device)) for device in devices]
    backends = [["backend", "on", "usable", "same bits as reference", "rules", "why"]]
    for name in (name for name in BACKENDS if name != "auto"):
        proofs = [proof_of(name, device, by_form=False) for device in devices]
        shown = [proof for proof in proofs if proof.usable] or proofs[-1:]
        rules = ", ".join(CAPABILITIES.get(name, Capability()).rules)
        for proof in shown:
            exact = ("yes" if proof.exact else "no") if proof.usable else "-"
            usable = "yes" if proof.usable else "no"
            backends.append([name, proof.device, usable, exact, rules, proof.reason])
    auto = [[str(device), backend.name, why] for device, (backend, why) in chosen]
    tables = columns(_machine()), columns(backends), "fused_backend='auto' takes", columns(auto)
    print("\n\n".join(tables))
    return 0
