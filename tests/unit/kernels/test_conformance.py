"""Backends with other bits than ``reference`` stay within the tolerance that docs/numerics.md
states. Apex and Transformer Engine are stand-ins on a CPU and the real libraries on a GPU.
test_kernel_bits.py compares native and Triton kernels to the bit."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mp_optim.config.rules import CAPABILITIES, KERNEL_RULES, Capability
from mp_optim.core import Slot, SlotUpdate
from mp_optim.core.slot_state import REMAINDER
from mp_optim.kernels import Backend, choose_backend
from mp_optim.kernels.codecs import join
from mp_optim.kernels.kernel_args import TensorLists
from mp_optim.kernels.reference import ReferenceBackend, step_with
from mp_optim.rules.rule_optimizer import RuleOptimizer
from support import kernel_cases
from support.differences import Deviation
from support.kernels import require_usable
from support.standins.gpu import GPU

NAMES = ("torch", "apex", "transformer_engine")
STANDINS = ("apex", "transformer_engine")
OUTPUTS = (None, torch.bfloat16, torch.float16, torch.float32)
GRADS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (0, 1, 7, 257, 3000, 0)
BASE: dict[str, Any] = {**kernel_cases.GROUP, "lr": 0.01}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "adam": [
        {},
        {"adam_w_mode": False},
        {"bias_correction": False},
        {"weight_decay": 0.0, "betas": (0.0, 0.95)},
    ],
    "lamb": [
        {},
        {"adam_w_mode": False},
        {"weight_decay": 0.0},
        {"weight_decay": 0.0, "use_nvlamb": True},
        {"grad_averaging": False, "bias_correction": False},
    ],
    "sgd": [{}, {"momentum": 0.0}, {"nesterov": True, "weight_decay": 0.0}, {"dampening": 0.5}],
    "lion": [{}, {"weight_decay": 0.0}],
}
STATE = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
}


class Candidate(NamedTuple):
    name: str
    backend: Backend
    device: torch.device

    def check(self, found: Deviation) -> None:
        assert found.tolerable, (self.name, found)

    def claims(self, rule: str) -> bool:
        return rule in CAPABILITIES.get(self.name, Capability()).rules


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=NAMES)
def candidate(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Candidate]:
    name = request.param
    if device.type == "cpu" and name in STANDINS:
        request.getfixturevalue("faultless_standins")
    require_usable(name, device)
    yield Candidate(name, choose_backend(name, device)[0], device)
    if name in STANDINS and device.type == "cpu":
        assert GPU.damage == [], "a kernel was given what it does not check"


@functools.cache
def drawn(count: int, seed: int) -> Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return x * torch.exp2(-8 * torch.rand(count, generator=torch.Generator().manual_seed(seed + 1)))


def numbers(
    count: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    return drawn(count, seed).to(device, dtype, copy=True)


def lists_of(
    rule: str,
    device: torch.device,
    grad: torch.dtype = torch.float32,
    output: torch.dtype | None = None,
    sizes: Sequence[int] = SIZES,
    settings: dict[str, Any] | None = None,
) -> TensorLists:
    group = settings or BASE
    keys = STATE[rule] if rule != "sgd" or group.get("momentum") else ()
    state = {key: [numbers(n, 50 + i, device) * 0.1 for i, n in enumerate(sizes)] for key in keys}
    if "exp_avg_sq" in state:
        state["exp_avg_sq"] = [x.square() for x in state["exp_avg_sq"]]
    return TensorLists(
        [numbers(n, i, device) for i, n in enumerate(sizes)],
        [numbers(n, 100 + i, device, grad) for i, n in enumerate(sizes)],
        state,
        [None if output is None else torch.zeros(n, device=device, dtype=output) for n in sizes],
    )


EVERY_SETTING = [(rule, settings) for rule in KERNEL_RULES for settings in SETTINGS[rule]]
each_setting = pytest.mark.parametrize(("rule", "settings"), EVERY_SETTING, ids=str)


def written(main: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weights, at = main.to(dtype), torch.arange(main.numel(), device=main.device)
    for value, residue in zip((0.5, -0.0, math.inf, math.nan), (1, 3, 5, 6), strict=True):
        weights[at % 7 == residue] = value
    weights[at % 11 == 0] = main.to(dtype)[at % 11 == 0]
    equal = (weights == main.to(dtype)) & (weights.signbit() == main.signbit())
    return weights, torch.where(equal, main, weights.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion", "lamb"])
def test_backend_continues_from_weights_that_other_code_wrote(candidate, rule, dtype):
    if not candidate.claims(rule):
        pytest.skip(f"{candidate.name} has no kernels for {rule}")
    mains = [numbers(n, i, candidate.device) for i, n in enumerate(SIZES)]
    pairs = [written(main, dtype) for main in mains]
    results = []
    for name, params in ((candidate.name, mains), ("reference", [merged for _, merged in pairs])):
        params = [nn.Parameter(param.clone()) for param in params]
        optimizer = RuleOptimizer(rule, params, 0.01, 0.1, backend=name)
        outputs = [weights.clone() for weights, _ in pairs]
        updates = [
            SlotUpdate(Slot(0, i), numbers(p.numel(), 9 + i, candidate.device), 0.5, outputs[i])
            for i, p in enumerate(params)
        ]
        optimizer.step_slots(updates)
        results.append([param.detach() for param in params])
        assert all(
            same_bits(out, p.detach().to(dtype)) for out, p in zip(outputs, params, strict=True)
        )
    found = Deviation()
    for ours, theirs in zip(*results, strict=True):
        found.params(*(each.nan_to_num(7.0, 7.0, 7.0) for each in (ours, theirs)), 0.01)
    candidate.check(found)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@each_setting
def test_backend_has_promised_accuracy_for_every_rule_and_dtype(candidate, rule, settings):
    for at, grad in enumerate(GRADS):
        for output in OUTPUTS[at % 2 :: 2]:
            check_two_steps(candidate, rule, settings, grad, output)


def check_two_steps(
    candidate: Candidate,
    rule: str,
    settings: dict[str, Any],
    grad: torch.dtype,
    output: torch.dtype | None,
) -> None:
    group, sizes = BASE | settings, SIZES
    GPU.calls.clear()
    multiplier = 1.0 if output == torch.bfloat16 else float(torch.tensor(0.37))
    ours, theirs = (lists_of(rule, candidate.device, grad, output, sizes, group) for _ in range(2))
    before = [g.clone() for g in ours.grad]
    for step in (1, 2):
        step_with(candidate.backend, rule, ours, group, step, multiplier)
        step_with(ReferenceBackend(), rule, theirs, group, step, multiplier)
    found = Deviation()
    found.lists(ours, theirs, group["lr"])
    assert found.same if not candidate.claims(rule) else True, (
        "what it has no kernels for is reference's"
    )
    candidate.check(found)
    assert all(torch.equal(a, b) for a, b in zip(ours.grad, before, strict=True)), (
        "gradients are read only"
    )
    if candidate.name in STANDINS and candidate.device.type == "cpu":
        by_kernel = candidate.claims(rule) and grad != torch.float64
        assert any(rule in call for call in GPU.calls) == by_kernel
    start = lists_of(rule, candidate.device, sizes=sizes)
    largest = sizes.index(max(sizes))
    assert not torch.equal(ours.main[largest], start.main[largest])


@pytest.mark.parametrize("candidate", ["transformer_engine"], indirect=True)
@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_transformer_engine_steps_compact_state_within_bf16_rounding(candidate, moments, remainder):
    """One step from equal state differs by single roundings to bfloat16. test_kernel_bits.py
    compares native and Triton kernels; apex has no kernels for compact state."""
    results = []
    for backend in (candidate.backend, ReferenceBackend()):
        lists = lists_of("adam", candidate.device, torch.bfloat16, torch.bfloat16)
        state = {key: [x.to(moments) for x in tensors] for key, tensors in lists.state.items()}
        mains = [x.bfloat16() for x in lists.main] if remainder else lists.main
        if remainder:
            state[REMAINDER] = [
                (numbers(x.numel(), 9, candidate.device) * 1e4).to(torch.int16) for x in mains
            ]
        lists = TensorLists(mains, lists.grad, state, lists.output)
        step_with(backend, "adam", lists, BASE, 3, 1.0)
        results.append(lists)
    ours, theirs = results
    found = Deviation()
    for i in range(len(SIZES)):
        p, q = (
            join(x.main[i], x.state[REMAINDER][i]) if remainder else x.main[i]
            for x in (ours, theirs)
        )
        found.params(p, q, BASE["lr"])
        for key in STATE["adam"]:
            found.others(
                ours.state[key][i],
                theirs.state[key][i],
                2.0**-7 if moments == torch.bfloat16 else 1e-4,
            )
        found.others(ours.output[i], theirs.output[i], 2.0**-7)
    candidate.check(found)


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_backend_steps_empty_lists_and_empty_tensors(candidate, rule):
    many = ((5,) * 35 + (0,), (5,) * 40 + (0, 0))
    for sizes in ((), (0,), (0, 0), (5, 0), (0, 5), *many):
        ours, theirs = (lists_of(rule, candidate.device, sizes=sizes) for _ in range(2))
        step_with(candidate.backend, rule, ours, BASE, 1, 1.0)
        step_with(ReferenceBackend(), rule, theirs, BASE, 1, 1.0)
        found = Deviation()
        found.lists(ours, theirs, BASE["lr"])
        candidate.check(found)
    assert candidate.backend.sum_of_squares([]).numel() == 0
    assert candidate.backend.sum_of_squares([torch.zeros(0, device=candidate.device)]).tolist() == [
        0.0
    ]


@pytest.mark.parametrize("rule", ["adam", "lamb", "sgd"])
@pytest.mark.parametrize(
    "sizes", [(300_001, 5), tuple(1 + i % 3 for i in range(1100))], ids=["large", "many"]
)
def test_backend_has_promised_accuracy_for_large_and_many_tensors(candidate, rule, sizes):
    if not candidate.claims(rule):
        pytest.skip(f"{candidate.name} has no kernels of its own for {rule}")
    ours, theirs = (
        lists_of(rule, candidate.device, torch.bfloat16, torch.bfloat16, sizes) for _ in range(2)
    )
    step_with(candidate.backend, rule, ours, BASE, 2, 0.5)
    step_with(ReferenceBackend(), rule, theirs, BASE, 2, 0.5)
    found = Deviation()
    for a, b in zip(ours.main, theirs.main, strict=True):
        found.params(a, b, BASE["lr"])
    candidate.check(found)
    found.others(
        candidate.backend.sum_of_squares(ours.grad), ReferenceBackend().sum_of_squares(theirs.grad)
    )
    candidate.check(found)


def test_sum_of_squares_has_promised_accuracy_for_any_dtype_and_strides(candidate):
    x = numbers(3000, 1, candidate.device)
    tensors = [
        x,
        x.bfloat16(),
        x.half(),
        x.double(),
        x.view(30, 100).t(),
        x.view(30, 100)[::2],
        x[:0],
    ]
    for some in (tensors, tensors[:3] + tensors[4:], [tensors[1], tensors[1]]):
        ours = candidate.backend.sum_of_squares(some)
        theirs = ReferenceBackend().sum_of_squares(some)
        assert ours.dtype == torch.float64
        assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-5)
    huge = torch.full((5,), 1e30)
    bad = torch.tensor([1.0, -math.inf])
    nan = torch.tensor([math.nan, 1.0])
    found = candidate.backend.sum_of_squares(
        [t.to(candidate.device) for t in (huge, bad, x.cpu(), nan)]
    ).tolist()
    assert found[0] == pytest.approx(5e60, rel=1e-5)
    assert found[1] == math.inf and math.isfinite(found[2]) and math.isnan(found[3])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("rule", ["adam", "lamb", "sgd"])
def test_backend_gives_nan_in_the_elements_of_reference_when_a_gradient_is_not_finite(
    candidate, rule, bad
):
    ours, theirs = (
        lists_of(rule, candidate.device, torch.bfloat16, sizes=(9, 300)) for _ in range(2)
    )
    for lists, backend in ((ours, candidate.backend), (theirs, ReferenceBackend())):
        lists.grad[0][2] = bad
        step_with(backend, rule, lists, BASE, 2, 0.5)
        step_with(backend, rule, lists, BASE, 3, 0.5)
    assert ours.main[0].isnan().tolist() == theirs.main[0].isnan().tolist()
    assert ours.main[0].isfinite().tolist() == theirs.main[0].isfinite().tolist()
    if candidate.name in STANDINS and rule == "sgd":
        assert set(GPU.flags) <= {0}, "a launch with the flag of an earlier one skips its step"
    found = Deviation()
    found.params(ours.main[1], theirs.main[1], BASE["lr"])
    candidate.check(found)


@pytest.mark.parametrize("rule", ["adam", "lamb", "sgd", "lion"])
def test_optimizer_steps_strided_params_and_skips_params_without_gradient(candidate, rule):
    if not candidate.claims(rule) and candidate.name != "torch":
        pytest.skip(f"{candidate.name} refuses {rule} at construction")
    results = []
    extra = {"momentum": 0.9} if rule == "sgd" else {}
    for name in (candidate.name, "reference"):
        params = [
            numbers(120, 1, candidate.device).view(10, 12).t(),
            numbers(33, 2, candidate.device),
            numbers(0, 3, candidate.device),
            numbers(64, 4, candidate.device),
        ]
        outputs = [
            torch.zeros(10, 12, device=candidate.device, dtype=torch.bfloat16).t(),
            None,
            None,
            torch.zeros(64, device=candidate.device, dtype=torch.bfloat16),
        ]
        optimizer = RuleOptimizer(rule, params, 0.01, 0.1, backend=name, **extra)
        before = params[1].clone()
        for step in range(2):
            grads = [
                numbers(120, 7 + step, candidate.device).view(12, 10),
                None,
                params[2],
                numbers(128, 8 + step, candidate.device, torch.bfloat16)[::2],
            ]
            optimizer.step_slots(
                [
                    SlotUpdate(Slot(0, i), g, 0.5, outputs[i])
                    for i, g in enumerate(grads)
                    if g is not None
                ]
            )
        assert torch.equal(params[1], before) and optimizer.slot_state(Slot(0, 1))["step"] == 0
        assert torch.equal(outputs[0], params[0].bfloat16())
        assert torch.equal(outputs[3], params[3].bfloat16())
        results.append(params)
    found = Deviation()
    for ours, theirs in zip(*results, strict=True):
        found.params(ours, theirs, 0.01)
    candidate.check(found)


@pytest.mark.parametrize("output", [torch.bfloat16, None])
def test_step_increases_the_tensor_version_of_every_written_parameter(candidate, output):
    lists = lists_of("adam", candidate.device, torch.bfloat16, output, sizes=(40, 7))
    models = lists.main if output is None else lists.output
    for step in (1, 2):
        before = [tensor._version for tensor in models]
        step_with(candidate.backend, "adam", lists, BASE, step, 1.0)
        after = [tensor._version for tensor in models]
        assert all(now > then for now, then in zip(after, before, strict=True))
