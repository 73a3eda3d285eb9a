#!/usr/bin/env python
"""A first program with the package as it is installed: train, save, resume.

python tools/smoke_test.py native       # what has to take the steps: native or reference
"""

import importlib.metadata
import re
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import mp_optim
from mp_optim.kernels import proof_of


def build() -> tuple[torch.nn.Module, mp_optim.MegatronOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)).bfloat16()
    config = mp_optim.OptimizerConfig(lr=1e-2, bf16=True)
    return model, mp_optim.get_megatron_optimizer(config, model)


def train(model: torch.nn.Module, optimizer: mp_optim.MegatronOptimizer) -> list[float]:
    inputs = torch.ones(4, 8, dtype=torch.bfloat16)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(inputs).float() - 1.0).square().mean()
        loss.backward()
        assert optimizer.step().success
        losses.append(loss.item())
    return losses


def check_metadata() -> None:
    metadata = importlib.metadata.metadata("mp_optim")
    assert metadata["Version"] == mp_optim.__version__
    relative = re.findall(r"\]\((?!\w+:|#)[^)]*\)", metadata.get_payload())
    assert not relative, f"links that lead nowhere on a package index: {relative}"


def main(backend: str) -> None:
    check_metadata()
    assert Path(mp_optim.__file__).is_relative_to(sys.prefix), mp_optim.__file__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = build()
        build()
    said = sum("native kernels are missing" in str(warning.message) for warning in caught)
    assert said == (backend != "native"), [str(warning.message) for warning in caught]
    assert {row.backend for row in optimizer.describe().rows} == {backend}
    proof = proof_of(backend, torch.device("cpu"))
    assert proof.exact, proof.reason
    losses = train(model, optimizer)
    assert losses[-1] < losses[0], losses
    with tempfile.TemporaryDirectory() as folder:
        mp_optim.checkpoint.save(folder, model, optimizer)
        expected = train(model, optimizer)
        mp_optim.checkpoint.load(folder, model, optimizer)
    assert train(model, optimizer) == expected
    print(
        f"{mp_optim.__version__} steps with {backend}: loss {losses[0]:.3f} -> {expected[-1]:.3f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
