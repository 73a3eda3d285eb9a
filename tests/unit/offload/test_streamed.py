"""Streamed state: the bits of the device, and at most three windows in device memory."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import mp_optim
from mp_optim.apps.fit.model_plan import plan
from mp_optim.host.host_memory import page_locked_bytes
from mp_optim.rules.rule_executor import RuleExecutor
from support.models import AdversarialTransfer
from support.offload import differing, hybrids
from support.streamed import FORMS, LARGEST, build, train


def test_offload_to_cpu_keeps_addresses_and_bits_when_state_is_streamed():
    model, optimizer = build()
    train(model, optimizer, 2)

    def addresses():
        tensors = [*optimizer.state_dict()["state"][0].values()]
        return [tensor.data_ptr() for tensor in tensors if tensor.dim()]

    before = addresses()
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()
    assert addresses() == before
    expected = train(*build(place="device"), 4)
    assert differing(train(model, optimizer, 2, 2), expected) == []


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_streaming_rounds_like_the_device_when_a_param_exceeds_the_window(tmp_path, on_disk):

    def stepped(**place: Any) -> torch.Tensor:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(600_000).bfloat16())
        optimizer = mp_optim.AdamW(
            [("p", param)],
            lr=1e-2,
            state="8bit",
            main_params="remainder8",
            stochastic_rounding=True,
            **place,
        )
        for step in range(3):
            param.grad = torch.randn(600_000).bfloat16() * (step + 1)
            optimizer.step()
        return torch.cat([param.detach().float(), optimizer.state[param]["exp_avg"].float()])

    window = {"offload": 1.0, "offload_place": "streamed", "stream_window_bytes": 1 << 20}
    path = {"optimizer_state_path": tmp_path} if on_disk else {}
    assert torch.equal(stepped(), stepped(**window, **path))


class DeviceMemory(TorchDispatchMode):
    """Counts the bytes that ``new_empty`` allocates on the device of a gradient."""

    def __init__(self):
        super().__init__()
        self._made, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default:
            self._made.append((StorageWeakRef(made.untyped_storage()), made.nbytes))
            self.most = max(self.most, self.held)
        return made

    @property
    def held(self):
        return sum(size for storage, size in self._made if not storage.expired())


class Recorded(AdversarialTransfer):
    def __init__(self, calls):
        super().__init__()
        self._calls = calls

    def upload(self, to, sources, after=None):
        self._calls.append("up")
        return super().upload(to, sources, after)

    def download(self, to, sources, after=None):
        self._calls.append("down")
        return super().download(to, sources, after)


def test_streaming_uploads_the_next_window_before_stepping_the_current_window(monkeypatch):
    """An upload waits for the steps that were queued before that upload."""
    model, optimizer = build()
    calls, carry_out = [], RuleExecutor.carry_out

    def recorded(self, planned):
        calls.append("step")
        carry_out(self, planned)

    monkeypatch.setattr(RuleExecutor, "carry_out", recorded)
    (hybrid,) = hybrids(optimizer)
    hybrid.stepper.use_transfer(Recorded(calls))
    train(model, optimizer, 1)
    # There are two groups, so one window holds a launch of each.
    order = [call for n, call in enumerate(calls) if calls[n - 1 : n + 1] != ["step"] * 2]
    count = calls.count("up")
    assert count > 3
    assert order == ["up", *["up", "step", "down"] * (count - 1), "step", "down"]


class CountingTransfer(AdversarialTransfer):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def empty_host(self, num_bytes, pin):
        assert pin
        self.sizes.append(num_bytes)
        return super().empty_host(num_bytes, pin)


@pytest.mark.parametrize("window", [4096, 8192, 1 << 20])
@pytest.mark.parametrize("form", ["fp32", "8-bit"])
def test_streaming_holds_three_windows_on_the_device_in_a_step_and_none_after(form, window):
    compact = {"use_precision_aware_optimizer": True} if form != "fp32" else {}
    model, optimizer = build(window=window, **compact, **FORMS[form])
    (hybrid,) = hybrids(optimizer)
    transfer = CountingTransfer()
    hybrid.stepper.use_transfer(transfer)
    planned = plan(model, optimizer.config)
    with DeviceMemory() as rings:
        train(model, optimizer, 2)
    assert rings.held == 0
    assert 0 < rings.most <= 3 * window
    assert planned.accelerator.staging == rings.most
    assert planned.accelerator.main_params == planned.accelerator.moments == 0
    pieces = [*transfer.sizes, hybrid.executor.main_memory.capacity]
    pinned = planned.pinned_host.moments + planned.pinned_host.main_params
    assert pinned == sum(map(page_locked_bytes, pieces))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "lamb"}, r"big needs \d+ bytes; set stream_window_bytes"),
        ({"optimizer": "muon"}, "muon needs whole parameters, and big needs"),
        ({"fraction": 0.0}, "offload_place='streamed': has no effect without"),
        ({"window": 100}, "stream_window_bytes=100: must be a whole number"),
    ],
)
def test_streaming_refuses_windows_too_small_and_settings_without_effect(fields, message):
    with pytest.raises(ValueError, match=message):
        build(**fields)


def test_streaming_accepts_the_window_size_that_the_error_names():
    with pytest.raises(ValueError, match=r"; set stream_window_bytes=\d+ or more") as error:
        build(optimizer="lamb")
    needed = int(re.search(r"big needs (\d+) bytes", str(error.value))[1])
    with pytest.raises(ValueError, match="set stream_window_bytes"):
        build(optimizer="lamb", window=needed - 1)
    expected = train(*build(place="device", optimizer="lamb"), 2)
    assert differing(train(*build(optimizer="lamb", window=needed), 2), expected) == []


def test_add_param_group_refuses_a_param_larger_than_the_streaming_window():
    _, optimizer = build(optimizer="lamb", window=LARGEST)
    large = nn.Parameter(torch.ones(LARGEST))
    with pytest.raises(ValueError, match="stream_window_bytes"):
        optimizer.add_param_group({"params": [("large", large)]})
