"""Muon's element passes: every backend has the bits of the reference, and the reference has the
bits of numpy in FP64."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mp_optim.core import Slot, SlotUpdate
from mp_optim.kernels.native_library import native_library
from mp_optim.kernels.triton import triton_backend
from mp_optim.muon.muon import MuonRule
from mp_optim.rules.rule_optimizer import RuleOptimizer
from support.kernels import needs_kernels

MOMENTA = ["float32", "bfloat16", "float16", "uint8"]
REMAINDERS = [None, 16, 8]
SHAPES = [(3, 5), (16, 16), (2, 24, 40), (33, 130), (0, 4)]
GRADS = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1e-42, 3e38, -3e38]
FOUND, WHY = triton_backend()
ON_GPU = FOUND is not None and not FOUND.interpreted


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Triton's interpreter warns of overflow.
        yield
    torch.set_num_threads(before)


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator).view(-1)
    made[: len(SPECIAL)] = torch.tensor(SPECIAL)[: made.numel()]
    return made.view(shape).to(dtype)


def stepped(backend: str, form: dict[str, Any], grads: torch.dtype) -> list[Tensor]:
    bits = form["param_remainder_bits"]
    precision = {
        "exp_avg_dtype": getattr(torch, form["momentum_dtype"]),
        "stochastic_rounding": form["noisy"],
        "store_param_remainders": bits is not None,
        "param_remainder_bits": bits or 16,
    }
    dtype = torch.float32 if bits is None else torch.bfloat16
    device = "cuda" if ON_GPU and backend == "triton" else "cpu"
    params = [
        nn.Parameter(values(shape, at, dtype).to(device)) for at, shape in enumerate(form["shapes"])
    ]
    outputs = [torch.zeros_like(param, dtype=form["output"]) for param in params]
    optimizer = RuleOptimizer(
        MuonRule(),
        [(f"p{at}", param) for at, param in enumerate(params)],
        lr=0.02,
        weight_decay=form["decay"],
        momentum=form["momentum"],
        nesterov=form["nesterov"],
        fp32_matmul_prec=form["products"],
        backend=backend,
        **precision,
    )
    for step in range(2):
        optimizer.step_slots(
            [
                SlotUpdate(
                    Slot(0, at),
                    values(shape, 100 * step + at, grads).to(device),
                    multiplier=form["multiplier"],
                    output=outputs[at],
                )
                for at, shape in enumerate(form["shapes"])
            ]
        )
    assert optimizer.executor.backend_and_reason(0, "device", torch.device(device))[0] == backend
    state = [
        tensor
        for param in params
        for tensor in optimizer.state[param].values()
        if isinstance(tensor, Tensor)
    ]
    return [param.detach() for param in params] + outputs + state


def forms() -> list[dict[str, Any]]:
    made = []
    for at, (momentum, bits, noisy) in enumerate(
        itertools.product(MOMENTA, REMAINDERS, [False, True])
    ):
        if noisy and bits is None and momentum == "float32":
            # The config refuses this form because stochastic rounding would round no tensor.
            continue
        made.append(
            {
                "shapes": SHAPES,
                "momentum_dtype": momentum,
                "param_remainder_bits": bits,
                "noisy": noisy,
                "momentum": [0.95, 0.3, 0.5, 0.0][at % 4],
                "nesterov": at % 2 == 0,
                "decay": [0.1, 0.0][at // 2 % 2],
                "products": ["medium", "highest"][at // 3 % 2],
                "multiplier": [1.0, 0.37][at % 2],
                "output": torch.bfloat16 if bits else [torch.float16, torch.float32][at % 2],
            }
        )
    return made


def name_of(form: dict[str, Any]) -> str:
    return f"{form['momentum_dtype']}-{form['param_remainder_bits']}-{form['noisy']}"


def same(a: Tensor, b: Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    equal = (a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and bool(equal.all())


@pytest.fixture
def levels() -> Iterator[list[str]]:
    library = native_library()
    yield library.levels
    library.set_level(library.levels[0])


@needs_kernels
@pytest.mark.parametrize("form", forms(), ids=name_of)
def test_native_muon_kernels_match_the_reference_bits_for_every_state_form(form, levels):
    grads = GRADS[forms().index(form) % 3]
    expected = stepped("reference", form, grads)
    assert levels
    for level in levels:
        native_library().set_level(level)
        found = stepped("native", form, grads)
        assert len(found) == len(expected) and all(map(same, found, expected)), level


@pytest.mark.parametrize("form", forms()[::4], ids=name_of)
def test_triton_muon_kernels_match_the_reference_bits_for_every_fourth_state_form(form):
    if FOUND is None:
        pytest.skip(f"no Triton kernels: {WHY}")
    few = form | {"shapes": [(3, 5), (2, 12, 24)]}
    grads = GRADS[forms().index(form) % 3]
    expected, found = (stepped(name, few, grads) for name in ("reference", "triton"))
    assert len(found) == len(expected) and all(map(same, found, expected))


@needs_kernels
@pytest.mark.parametrize("momentum", [0.95, 0.5, 0.2])
def test_muon_momentum_rounds_once_from_fp64_when_magnitudes_differ(momentum):
    shape = (40, 64)
    scale = torch.logspace(-6, 6, 64)
    grads = [values(shape, 1, torch.float32) * scale, values(shape, 2, torch.float32)]
    param = nn.Parameter(torch.zeros(shape))
    optimizer = RuleOptimizer(MuonRule(), [param], momentum=momentum, backend="native")
    expected = np.zeros(shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for grad in grads:
            change = grad.numpy() - expected
            weight = np.float32(1 - momentum)
            start, factor = expected, np.float64(weight)
            if 1 - momentum >= 0.5:
                start, factor = grad.numpy(), np.float64(np.float32(weight - 1))
            expected = (start.astype(np.float64) + change * factor).astype(np.float32)
            param.grad = grad
            optimizer.step()
    found = optimizer.state[param]["momentum_buffer"]
    assert same(found, torch.from_numpy(expected))
