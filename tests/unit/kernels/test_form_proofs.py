"""A kernel form is compared with the reference when a step first needs the form."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mp_optim
from mp_optim.kernels import choose_backend, selection
from mp_optim.kernels.triton import proofs

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted"
)
CPU = torch.device("cpu")
CLASSES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "adamw": (mp_optim.AdamW, {}, ["adam"]),
    "adamw, 8bit": (
        mp_optim.AdamW,
        {"state": "8bit", "main_params": "remainder16", "stochastic_rounding": True},
        ["adam"],
    ),
    "lamb": (mp_optim.LAMB, {}, ["lamb_moments", "lamb_apply"]),
    "muon": (mp_optim.Muon, {}, ["muon_momentum", "muon_apply"]),
    # The first step of momentum is another kernel form.
    "sgd": (mp_optim.SGD, {"momentum": 0.9}, ["sgd", "sgd"]),
}


@pytest.fixture
def triton() -> Iterator[Any]:
    pytest.importorskip("triton")
    backend, _ = choose_backend("triton", CPU)
    before, backend.proofs = backend.proofs, type(backend.proofs)()
    backend.prove_at_first_use()
    yield backend
    backend.proofs = before


def test_triton_compares_sum_of_squares_with_reference_once_per_gradient_dtype(triton: Any) -> None:
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        grads = [torch.ones(100, dtype=dtype)]
        assert float(triton.sum_of_squares(grads)) == 100.0
    forms = [form[:2] for form in triton.proofs.is_right]
    assert forms == [("sum_of_squares", torch.bfloat16), ("sum_of_squares", torch.float32)]


def test_triton_runs_a_known_form_while_another_thread_compares_a_form(
    triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [torch.ones(100)]
    triton.sum_of_squares(known)
    is_comparing, may_end = threading.Event(), threading.Event()

    def differences(*args: Any, real: Any = proofs.differences) -> Any:
        is_comparing.set()
        may_end.wait(60)
        return real(*args)

    monkeypatch.setattr(proofs, "differences", differences)
    with ThreadPoolExecutor(2) as pool:
        new = pool.submit(triton.sum_of_squares, [torch.ones(100, dtype=torch.bfloat16)])
        try:
            assert is_comparing.wait(60)
            assert float(pool.submit(triton.sum_of_squares, known).result(10)) == 100.0
            assert not new.done()
        finally:
            may_end.set()
    assert float(new.result()) == 100.0


def trained(name: str, backend: str) -> list[Tensor]:
    cls, settings, _ = CLASSES[name]
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(16, 40).bfloat16()) for _ in range(2)]
    named = [(f"w{index}", param) for index, param in enumerate(params)]
    optimizer = cls(named, lr=1e-2, backend=backend, **settings)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(16, 40).bfloat16()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", CLASSES)
def test_triton_compares_with_reference_only_the_kernel_forms_that_a_step_uses(
    triton: Any, name: str
) -> None:
    found, expected = trained(name, "triton"), trained(name, "reference")
    passes = [form[0] for form in triton.proofs.is_right if form[0] != "sum_of_squares"]
    assert passes == CLASSES[name][2]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("trouble", ["wrong", "raises"])
def test_triton_warns_and_steps_with_the_bits_of_reference_when_a_kernel_is_wrong(
    triton: Any, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*arguments: Any) -> None:
        if trouble == "raises":
            raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(triton, "launch", launch)  # It launches no kernel.
    with pytest.warns(UserWarning, match=r"triton on cpu, adam: .*(other bits|newer driver)"):
        found = trained("adamw", "triton")
    assert all(map(torch.equal, found, trained("adamw", "reference")))


def test_choose_backend_runs_no_triton_kernel_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(selection, "prove", None)
    _, proof = selection._proven.__wrapped__("triton", CPU, True)
    assert proof.exact and "first use" in proof.reason
