"""``offload_place="auto"``: some on the host, some streamed, others at the next step; the bits of
the device."""

import math
import time
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim import FusedAdam, FusedLAMB, HybridDeviceOptimizer, checkpoint
from mp_optim.core.interrupted_step import BrokenOffError
from mp_optim.factory.memory_plan import plan
from mp_optim.host.host_memory import page_locked_bytes
from mp_optim.offload.buckets import STEPS, Split, StepTime
from mp_optim.rules.rule_executor import RuleExecutor
from support.models import AdversarialTransfer
from support.offload import differing, hybrids, snapshot
from support.streamed import Model, build, give_gradients, go_backward, programs, train

MODES = ("sync", "overlap", "speculative")
SHARES = st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0])


def stepper_of(optimizer):
    (hybrid,) = hybrids(optimizer)
    return hybrid.stepper


def places(optimizer):
    return {row.place for row in optimizer.describe().rows}


# -- the bits of every other place ----------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    program=programs(),
    mode=st.sampled_from(MODES),
    shares=st.lists(st.none() | SHARES, min_size=5, max_size=5),
    clips=st.booleans(),
)
def test_the_bits_of_the_device_however_it_is_split(program, mode, shares, clips):
    """And however that changes between steps. None: it stays."""
    program |= {"clip_grad": 1.0 if clips else 0.0}
    expected = train(*build(place="device", **program), len(shares))
    model, optimizer = build(place="auto", offload_mode=mode, **program)
    for step, share in enumerate(shares):
        if share is not None:
            stepper_of(optimizer).stream(share)
        go_backward(model, step)
        assert optimizer.step().success
    assert differing(snapshot(model, optimizer), expected) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_share_is_streamed_from_the_next_step_on(mode):
    model, optimizer = build(place="auto", offload_mode=mode, clip_grad=0.0)
    for step, share in enumerate((0.0, 1.0, 0.0, 1.0)):
        stepper_of(optimizer).stream(share)
        go_backward(model, step)
        optimizer.step()
        assert places(optimizer) == {"streamed" if share else "host"}


@pytest.mark.parametrize("mode", MODES)
def test_a_split_that_is_measured(mode):
    """Places change while it is, and the bits do not."""
    model, optimizer = build(place="auto", offload_mode=mode, clip_grad=0.0)
    seen = []
    for step in range(3 * STEPS + 1):
        seen.append(places(optimizer))
        go_backward(model, step)
        optimizer.step()
    assert seen[0] == {"host"} and {"streamed"} in seen
    assert "the fastest of" in str(optimizer.describe())
    expected = train(*build(place="device", clip_grad=0.0), 3 * STEPS + 1)
    assert differing(snapshot(model, optimizer), expected) == []


def test_released_gradients_and_skipped_steps():
    def run(**fields):
        model, optimizer = build(**fields)
        for step in range(5):
            give_gradients(model, step, bad=step == 2)
            if step != 2:
                optimizer.zero_grad()
                go_backward(model, step)
            assert optimizer.step().success == (step != 2)
        return snapshot(model, optimizer)

    expected = run(place="device")
    auto = {"offload_streamed_fraction": 0.5, "release_gradients": True}
    found = run(place="auto", offload_mode="speculative", **auto)
    assert differing(found, expected) == []


def test_resumed_in_other_places(tmp_path):
    expected = train(*build(place="device"), 6)
    model, optimizer = build(place="device")
    train(model, optimizer, 2)
    for start, place in ((2, "auto"), (4, "host")):
        checkpoint.save(tmp_path / place, model, optimizer)
        model, optimizer = build(place=place)
        if place == "auto":
            stepper_of(optimizer).stream(0.5)
        checkpoint.load(tmp_path / place, model, optimizer)
        found = train(model, optimizer, 2, start)
    assert differing(found, expected) == []


def test_groups_that_come_later_are_split_too():
    def run(place):
        model, optimizer = build(place=place, offload_mode="sync")
        extra = torch.nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": [("extra", extra)]})
        for step in range(3):
            if place == "auto":
                stepper_of(optimizer).stream(step / 2)
            go_backward(model, step)
            extra.grad = torch.ones_like(extra)
            optimizer.step()
        return extra.detach().clone()

    assert torch.equal(run("auto"), run("device"))


# -- both at once -----------------------------------------------------------------------------


class Ordered(AdversarialTransfer):
    """Notes copies, gradients after a mark and windows among them, and what is waited for."""

    def __init__(self):
        super().__init__()
        self.calls, self.copies = [], []

    def _start(self, is_upload, to, sources):
        self.copies.append(self.calls[-1])
        return super()._start(is_upload, to, sources)

    def mark(self):
        return "mark"

    def download(self, to, sources, after=None):
        self.calls.append("gradients" if after else "down")
        return super().download(to, sources, after)

    def upload(self, to, sources, after=None):
        self.calls.append("window" if after else "params")
        return super().upload(to, sources, after)

    def wait(self, ticket):
        self.calls.append(f"wait for {self.copies[ticket]}")
        super().wait(ticket)

    def join(self):
        calls, self.calls = self.calls, []  # it is the device that waits
        super().join()
        self.calls = calls


def test_the_hosts_first_gradients_come_before_windows_and_no_window_is_waited_for():
    model, optimizer = build(place="auto", offload_streamed_fraction=0.655)
    transfer = Ordered()
    stepper_of(optimizer).use_transfer(transfer, 64)
    train(model, optimizer, 1)
    calls = transfer.calls
    assert calls.index("gradients") < calls.index("window")
    first = next(number for number, call in enumerate(calls) if call.startswith("wait"))
    assert calls[first] == "wait for gradients"
    assert calls[:first].count("window") == 3 and calls[:first].count("down") == 2


def test_windows_are_queued_between_the_hosts_buckets():
    model, optimizer = build(place="auto", offload_streamed_fraction=0.655)
    stepper_of(optimizer).use_transfer(AdversarialTransfer(), 64)
    train(model, optimizer, 2)
    (hybrid,) = hybrids(optimizer)
    spans = [span.stage for span in hybrid.timeline.last]
    known = {"stream_step": "s", "host_step": "h"}
    order = "".join(known.get(stage, "") for stage in spans)
    # Eight windows beside three buckets. Before the first bucket two are queued, and the third is
    # on its way; for another the host would have to wait.
    assert order == "sshssshsssh"


def test_state_that_was_written_without_a_trace_is_stepped_again():
    def run(**fields):
        model, optimizer = build(clip_grad=0.0, **fields)
        for step in range(5):
            go_backward(model, step)
            if step == 4:
                stepper_of(optimizer).schedule.collect()  # the host's share is stepped
                for of_slot in optimizer.state_dict()["state"].values():
                    of_slot["exp_avg"].data.mul_(0.5)
            optimizer.step()
        return snapshot(model, optimizer)

    halves = {"offload_streamed_fraction": 0.5, "offload_mode": "speculative"}
    assert differing(run(place="auto", **halves), run(place="host")) == []


def test_what_was_stepped_in_backward_is_published_beside_windows():
    mode = {"offload_mode": "speculative", "clip_grad": 0.0}
    model, optimizer = build(place="auto", offload_streamed_fraction=0.5, **mode)
    for step in range(4):
        go_backward(model, step)
        optimizer.step()
    metrics = optimizer.metrics()
    assert metrics["speculation_hits"] >= 2 and metrics["speculation_redone"] == 0


def test_what_is_streamed_from_now_on_leaves_the_back_buffer():
    """Else that would have to stay for it."""

    def addresses():
        state = optimizer.state_dict()["state"]
        return {
            (slot, key): value.data_ptr()
            for slot, of_slot in state.items()
            for key, value in of_slot.items()
            if key != "step" and value.numel() > 1
        }

    mode = {"offload_mode": "speculative", "clip_grad": 0.0}
    model, optimizer = build(place="auto", offload_streamed_fraction=0.0, **mode)
    train(model, optimizer, 1)
    first = addresses()
    for step in range(1, 6):
        if step == 5:
            assert addresses() != first
            stepper_of(optimizer).stream(1.0)
        go_backward(model, step)
        optimizer.step()
    assert addresses() == first


@pytest.mark.parametrize("failing", ["stream_step", "host_step"])
def test_a_kernel_that_raises_breaks_the_step_off(failing, monkeypatch):
    model, optimizer = build(place="auto", offload_streamed_fraction=0.5)
    train(model, optimizer, 2)
    kernel = RuleExecutor.carry_out
    (hybrid,) = hybrids(optimizer)
    stage, stages = hybrid.timeline.stage, []

    @contextmanager
    def noted(name, label=""):
        stages.append(name)
        with stage(name, label):
            yield

    def fails(self, planned):
        kernel(self, planned)
        if stages[-1] == failing:
            raise RuntimeError("mp_adam: the kernels failed")

    monkeypatch.setattr(hybrid.timeline, "stage", noted)
    monkeypatch.setattr(RuleExecutor, "carry_out", fails)
    give_gradients(model, 2)
    with pytest.raises(RuntimeError, match="mp_adam: the kernels failed"):
        optimizer.step()
    monkeypatch.undo()
    with pytest.raises(BrokenOffError):
        optimizer.step()


# -- which share ----------------------------------------------------------------------------------


def measured(on_host, streamed, both):
    """The share that stays, if steps take so long; (seconds, seconds of the host) each."""
    split = Split()
    shares = []
    for trial in (on_host, streamed, both):
        for extra in (9.0, 0.1, 0.0):  # the first step pays for what is made once
            shares.append(split.share)
            split.record(StepTime(trial[0] + extra, trial[1] + extra))
    return shares, split


@pytest.mark.parametrize(
    ("on_host", "streamed", "both", "tried", "stays"),
    [
        ((3.0, 3.0), (1.0, 0.0), (0.75, 0.75), 0.75, 0.75),
        ((1.0, 1.0), (3.0, 0.0), (0.75, 0.75), 0.25, 0.25),
        # Both at once is slower than hoped.
        ((3.0, 3.0), (1.0, 0.0), (1.2, 0.75), 0.75, 1.0),
        ((1.0, 1.0), (3.0, 0.0), (1.2, 0.75), 0.25, 0.0),
        # Two thirds of the host's work is hidden behind backward.
        ((1.0, 3.0), (1.0, 0.0), (0.25, 2.3), 0.25, 0.25),
    ],
)
def test_what_follows_from_the_times(on_host, streamed, both, tried, stays):
    shares, split = measured(on_host, streamed, both)
    assert shares == [0.0] * 3 + [1.0] * 3 + [pytest.approx(tried)] * 3
    assert split.share == pytest.approx(stays) and not split.is_measuring


def test_a_first_step_that_is_the_fastest_says_nothing():
    """It has other work than those that follow."""
    split = Split()
    for seconds in (0.1, 3.0, 3.0, 0.1, 1.0, 1.0):
        split.record(StepTime(seconds, 0.0 if split.share else seconds))
    assert split.share == pytest.approx(0.75)


def test_all_stays_on_the_host_where_it_is_hidden():
    _, split = measured((0.0, 3.0), (1.0, 0.0), (0.0, 3.0))
    assert split.share == 0.0 and not split.is_measuring


class SlowBus(AdversarialTransfer):
    """Windows take long to come up, gradients do not."""

    def upload(self, to, sources, after=None):
        if sum(each.nbytes for each in sources) > 3000:
            time.sleep(0.02)
        return super().upload(to, sources, after)


def test_a_bus_that_is_slow_leaves_most_to_the_host():
    model, optimizer = build(place="auto", clip_grad=0.0)
    stepper_of(optimizer).use_transfer(SlowBus())
    for step in range(3 * STEPS):
        give_gradients(model, step)
        optimizer.step()
    assert optimizer.metrics()["streamed_fraction"] < 0.5


# -- what it says of itself, and memory -----------------------------------------------------------


def test_what_it_says_of_itself():
    model, optimizer = build(place="auto", offload_streamed_fraction=0.5)
    train(model, optimizer, 1)
    described = optimizer.describe()
    assert {row.place for row in described.rows} == {"host", "streamed"}
    assert "is streamed (as offload_streamed_fraction says)" in str(described)
    assert 0.3 < optimizer.metrics()["streamed_fraction"] < 0.7
    assert "being measured" in str(build(place="auto")[1].describe())


class CountingTransfer(AdversarialTransfer):
    def __init__(self):
        super().__init__()
        self.pinned = []

    def empty_host(self, num_bytes, pin):
        if pin:
            self.pinned.append(num_bytes)
        return super().empty_host(num_bytes, pin)


@pytest.mark.parametrize("mode", MODES)
def test_pinned_memory_is_what_was_planned(mode):
    fields = {"offload_streamed_fraction": 0.5, "offload_mode": mode, "clip_grad": 0.0}
    model, optimizer = build(place="auto", **fields)
    transfer = CountingTransfer()
    stepper_of(optimizer).use_transfer(transfer)
    planned = plan(model, optimizer.config)
    for step in range(4):
        go_backward(model, step)
        optimizer.step()
    (hybrid,) = hybrids(optimizer)
    pieces = [size for size in (*transfer.pinned, hybrid.executor.main_memory.capacity) if size]
    assert planned.pinned_host.total == sum(map(page_locked_bytes, pieces))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"offload_streamed_fraction": 1.5}, "offload_streamed_fraction=1.5: must be"),
        ({"offload_streamed_fraction": math.nan}, "must be between 0 and 1"),
        ({"optimizer": "muon"}, "muon needs whole parameters, and big takes"),
        ({"optimizer": "lamb"}, r"big takes \d+ bytes; set stream_window_bytes"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        build(**{"place": "auto", **fields})


def test_two_classes_cannot_share_a_parameter():
    with pytest.raises(ValueError, match="FusedAdam and FusedLAMB are two"):
        HybridDeviceOptimizer(
            Model(torch.float32).parameters(), 1.0, FusedAdam, FusedLAMB, offload_place="auto"
        )
