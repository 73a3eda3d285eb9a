"""Audited steps name flipped bits and report nothing in clean steps."""

import copy
import warnings
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim.config.state_forms import BLOCK, blocks_of
from mp_optim.core.interrupted_step import BrokenOffError
from mp_optim.kernels.kernel_args import MAIN
from mp_optim.rules.audit import draw
from support.faults import faulty, read_wrong, written_wrong

PLACES = {
    "device": {},
    "host": {"offload": 1.0},
    "speculative": {"offload": 1.0, "offload_mode": "speculative"},
    "streamed": {"offload": 1.0, "offload_place": "streamed", "stream_window_bytes": 8192},
    "disk": {"offload": 1.0, "stream_window_bytes": 65536},
}
FORMS = {
    "fp32": {},
    "bf16 with averages": {"state": "bf16", "ema_decay": 0.9},
    "8bit": {"state": "8bit", "main_params": "remainder16"},
    "4bit": {"state": "4bit", "main_params": "remainder8", "stochastic_rounding": True},
    "none": {"state": "8bit", "main_params": "none"},
}
RULES = {
    "adamw": (mp_optim.AdamW, {}),
    "cautious adamw": (mp_optim.AdamW, {"cautious_wd": True}),
    "sgd": (mp_optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "lion": (mp_optim.Lion, {}),
}


def stack(place="device", rule="adamw", tmp_path=None, **settings):
    torch.manual_seed(0)
    shapes = ((13, 97), (256,), (0,), (), (5,))
    named = [
        (f"w{index}", nn.Parameter(torch.randn(s).bfloat16())) for index, s in enumerate(shapes)
    ]
    named.append(("plain", nn.Parameter(torch.randn(300))))
    cls, of_rule = RULES[rule]
    of_place = {
        **PLACES[place],
        **({"optimizer_state_path": str(tmp_path)} if place == "disk" else {}),
    }
    given = {"audit_rate": 1.0, "audit_action": "raise", **of_rule, **of_place, **settings}
    return [param for _, param in named], cls(named, lr=1e-2, **given)


def step(params, optimizer, count=1):
    for _ in range(count):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()


def finish_audit(params, optimizer):
    if params[0].device.type != "cpu":
        optimizer.state_dict()


def audited_step(params, optimizer):
    step(params, optimizer)
    finish_audit(params, optimizer)


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.02])
def test_audit_checks_elements_at_the_given_rate(rate):
    sizes = [300, 0, 1, 256, 70_000, 5_000]
    ends = list(accumulate(map(blocks_of, sizes)))
    times, draws = [torch.zeros(size) for size in sizes], 4000 if rate < 1.0 else 20
    for seed in range(draws):
        runs = list(draw(sizes, ends, rate, seed))
        for run in runs:
            assert run.start % BLOCK == 0
            assert run.start + run.numel <= sizes[run.owner]
            times[run.owner][run.start : run.start + run.numel] += 1
        spans = sorted((run.owner, run.start, run.start + run.numel) for run in runs)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))
    share = torch.cat(times) / draws
    assert (share - rate).abs().max() <= 5 * (rate * (1 - rate) / draws) ** 0.5 + 1e-6


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("fault", "tensors"),
    [
        (read_wrong("grad", 7), {"main_param", "exp_avg", "exp_avg_sq"}),
        (read_wrong("exp_avg", 7), {"main_param", "exp_avg"}),
        (read_wrong(MAIN, 7), {"main_param"}),
        (written_wrong("output", 7), {"param"}),
        (written_wrong("exp_avg_sq", 7), {"exp_avg_sq"}),
    ],
)
def test_audit_names_param_tensor_and_element_of_a_bit_flip(fault, tensors, place, tmp_path):
    params, optimizer = stack(place, "adamw", tmp_path)
    step(params, optimizer, 2)
    with faulty(fault, few=400), pytest.raises(mp_optim.AuditError) as caught:
        audited_step(params, optimizer)
    found = caught.value.mismatches
    assert {each.param for each in found} == {"w0"}
    assert {each.tensor for each in found} >= tensors
    pieces = {each.element for each in found}  # Each window of the parameter has the same fault.
    assert 7 in pieces and (len(pieces) == 1 or place in ("streamed", "disk"))
    assert all(each.rank == 0 and each.found_bits != each.expected_bits for each in found)
    assert "w0, element 7" in str(caught.value)


@pytest.mark.parametrize("rule", RULES)
def test_audit_repeats_triton_launches_with_host_kernels(rule):
    form = list(FORMS)[list(RULES).index(rule) % 4]
    settings = {**FORMS[form], "backend": "triton", "audit_action": "warn"}
    params, optimizer = stack(rule=rule, **settings)
    step(params, optimizer, 2)
    clean = optimizer.metrics()
    assert clean["audited_elements"] >= 2 * sum(param.numel() for param in params)
    assert clean["audit_mismatches"] == 0
    with faulty(written_wrong(MAIN, 7), few=400), pytest.warns(mp_optim.AuditWarning) as caught:
        step(params, optimizer)
    (said,) = [each.message for each in caught if isinstance(each.message, mp_optim.AuditWarning)]
    assert {(each.param, each.element) for each in said.mismatches} == {("w0", 7)}


def test_audit_error_refuses_step_and_save_until_a_load():
    params, optimizer = stack()
    step(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    with faulty(written_wrong(MAIN, 3), few=400), pytest.raises(mp_optim.AuditError):
        audited_step(params, optimizer)
    with pytest.raises(BrokenOffError, match="AuditError"):
        step(params, optimizer)
    with pytest.raises(BrokenOffError, match="AuditError"):
        optimizer.state_dict()
    optimizer.load_state_dict(saved)
    step(params, optimizer, 2)


def test_audit_warns_of_flipped_elements_and_continues_when_action_is_warn():
    params, optimizer = stack(audit_action="warn")
    step(params, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with faulty(written_wrong("output", 3), few=400):
            step(params, optimizer)
        step(params, optimizer)
    (alarm,) = [each.message for each in caught]
    assert isinstance(alarm, mp_optim.AuditWarning) and alarm.mismatches[0].tensor == "param"
    assert optimizer.metrics()["audit_mismatches"] == len(alarm.mismatches)


@pytest.mark.parametrize("rule", ["muon", "lamb"])
def test_audit_refuses_lamb_and_muon_by_name(rule):
    with pytest.raises(ValueError, match=rf"audit_rate=0.0001: .*{rule} reads (sums|matrices)"):
        mp_optim.OptimizerConfig(optimizer=rule, lr=1e-3, audit_rate=1e-4)
    cls = {"muon": mp_optim.Muon, "lamb": mp_optim.LAMB}[rule]
    with pytest.raises(ValueError, match="audit_rate"):
        cls([nn.Parameter(torch.ones(4, 4))], lr=1e-3, audit_rate=1e-4)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"audit_rate": 1.5}, "audit_rate=1.5: must be a finite number in"),
        ({"audit_rate": 1e-4, "audit_action": "log"}, "audit_action='log': must be one of"),
        ({"audit_rate": 1e-4, "fused_backend": "torch"}, "fused_backend='torch' gives other bits"),
    ],
)
def test_audit_refuses_invalid_settings_and_backends_with_other_bits(fields, text):
    with pytest.raises(ValueError) as caught:
        mp_optim.OptimizerConfig(lr=1e-3, **fields)
    assert text in str(caught.value)
    if "fused_backend" in fields:
        with pytest.raises(ValueError, match="gives other bits"):
            mp_optim.FusedAdam([torch.ones(3)], backend="torch", audit_rate=1e-4)
