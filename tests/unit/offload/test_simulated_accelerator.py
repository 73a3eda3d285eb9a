"""CUDA transfers, host pipeline, worker thread and hooks of the package on a simulated accelerator.

Random schedules have no race and give the bits of a plain run; removing any wait is reported.
"""

import gc
import pkgutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mp_optim.offload
from mp_optim import FusedAdam, HybridDeviceOptimizer
from mp_optim.core import Slot, SlotUpdate, SlotUpdates
from mp_optim.host import leases
from mp_optim.host.accelerator import accelerator_of
from mp_optim.host.host_memory import tensor_in
from mp_optim.host.transfer import fetch, transfer_for
from mp_optim.offload.backward_grads import BackwardJob
from mp_optim.offload.buckets import Staging, StepTimeline
from mp_optim.offload.speculation import SpeculativeStepper
from support.accelerator.disk import simulated_disk
from support.accelerator.removals import called, sites, without
from support.accelerator.saves import saves_of
from support.accelerator.schedules import (
    DEVICE,
    EVENTS,
    WRITES_GRADIENTS,
    Round,
    Schedule,
    outcome,
    plain_outcome,
)
from support.accelerator.simulation import COLLECTIVES, Simulation, device_at
from support.accelerator.stand_in import simulated_accelerator
from support.accelerator.streams import Pace
from support.offload import MODES, differing, state_of
from support.one_rank import one_rank

pytestmark = [
    pytest.mark.native,
    # Schedules skip steps and write gradients on purpose.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank(COLLECTIVES):
        yield


@st.composite
def schedules(draw):
    owner = draw(st.sampled_from(["stack", "zero", "hybrid"]))
    mode = draw(st.sampled_from(MODES))
    releases = owner == "stack" and mode != "sync" and draw(st.booleans())
    place = draw(st.sampled_from(["host", "streamed"]))
    has_no_backward_work = place == "streamed" and mode != "sync" and not releases
    unfit = {"zero": ["wider"], "hybrid": ["overflow"], "stack": []}[owner]
    unfit += WRITES_GRADIENTS if releases else []
    rounds = st.builds(
        Round,
        micro=st.just(1) if owner == "hybrid" else st.integers(1, 3),
        scale=st.sampled_from([1.0, 1.0, 10.0]),
        event=st.sampled_from([event for event in EVENTS if event not in unfit]),
        says_last=st.just(True) if owner == "zero" else st.booleans(),
    )
    return Schedule(
        owner=owner,
        mode=mode,
        releases=releases,
        precision=draw(st.sampled_from(["bf16", "fp32"])),
        fraction=draw(st.sampled_from([0.3, 0.7, 1.0])),
        clip=draw(st.sampled_from([0.0, 0.16, 1.0])),
        bucket_bytes=draw(st.sampled_from([256, 1024, 1 << 20])),
        pipelined=draw(st.booleans()),
        rounds=tuple(draw(st.lists(rounds, min_size=2, max_size=5))),
        pauses=draw(st.sampled_from([(), (0.002,), (0.0, 0.003)])),
        pace=draw(st.sampled_from(list(Pace))),
        seed=draw(st.integers(0, 99)),
        sets_device=draw(st.booleans()),
        place=place,
        is_on_disk=has_no_backward_work or draw(st.sampled_from([False, False, True])),
        audits=draw(st.booleans()),
    )


def check(schedule):
    run = outcome(schedule)
    assert not run.reports, "\n".join(run.reports)
    assert not run.wrong_bits(plain_outcome(schedule))


def test_audit_compares_results_only_after_the_worker_thread_has_finished(monkeypatch):
    def late(*arguments):
        time.sleep(0.05)  # The worker finishes the bucket before the prediction.
        return predicted(*arguments)

    predicted = SpeculativeStepper.predicted
    monkeypatch.setattr(SpeculativeStepper, "predicted", late)
    how = {"clip": 0.0, "pipelined": False, "sets_device": False, "audits": True}
    check(Schedule("zero", "speculative", rounds=(Round(),) * 2, **how))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(schedule=schedules())
def test_offload_is_free_of_races_in_random_schedules_on_a_simulated_device(schedule):
    check(schedule)


def transfer_and_memory(simulation, values=16):
    transfer = transfer_for(device_at(DEVICE))
    host = transfer.empty_host(4 * values, True).view(torch.float32)
    ones = simulation.to_device(torch.ones(values), DEVICE)
    return transfer, host, ones * 3


def download_of_what_is_dropped(simulation):
    transfer, host, value = transfer_and_memory(simulation)
    ticket = transfer.download([host], [value])
    del value
    transfer_and_memory(simulation)
    transfer.wait(ticket)
    return host.tolist() == [3.0] * 16


def upload_to_what_is_dropped(simulation):
    transfer, host, target = transfer_and_memory(simulation)
    ticket = transfer.upload([target], [host.fill_(1.0)])
    del target
    transfer_and_memory(simulation)
    transfer.wait(ticket)
    return True


def fetched_number(simulation):
    _, _, value = transfer_and_memory(simulation, 1)
    settings = {"cpu_optimizer_cls": FusedAdam, "gpu_optimizer_cls": FusedAdam}
    optimizer = HybridDeviceOptimizer([torch.nn.Parameter(torch.ones(1))], 1.0, **settings)
    optimizer.stepper.use_transfer(transfer_for(device_at(DEVICE)))
    return fetch(optimizer.stepper.settings.transfer, value)().item() == 3.0


def download_of_a_transfer_that_is_dropped(simulation):
    transfer, host, value = transfer_and_memory(simulation)
    transfer.download([host], [value])
    del transfer
    return host.tolist() == [3.0] * 16


def release_of_what_is_on_its_way(simulation):
    transfer, _, value = transfer_and_memory(simulation)
    staging = Staging(transfer, 1024, True)
    updates = SlotUpdates.of([SlotUpdate(Slot(0, 0), value)])
    staged = staging.tensors_for(0, updates).put_into(updates)
    timeline = StepTimeline()
    job = BackwardJob("", staging, updates, staged, {}, (), torch.stack, timeline, releases=True)
    job.prepare()
    job.release_grads()
    return job.updates is None and staged.grads[0].tolist() == [3.0] * 16


def params_after(sizes, simulation=None, fraction=1.0, by_backward=False, **place):
    """Return parameters and state after steps of a HybridDeviceOptimizer. Without a simulation the
    state is in host memory."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes]
    optimizer = HybridDeviceOptimizer(
        params, fraction, FusedAdam, FusedAdam, lr=0.5, **place if simulation else {}
    )
    if simulation:
        optimizer.stepper.use_transfer(transfer_for(device_at(DEVICE)))
        for param in params:
            simulation.to_device(param, DEVICE)
    for step in range(4 if by_backward else 3):
        for number, param in enumerate(params):
            grad = torch.full_like(param, 1.0 + number + step, requires_grad=False)
            if simulation:
                simulation.to_device(grad, DEVICE)
            param.grad = None if by_backward else grad * 0.5  # an operation of the device
            if by_backward:
                torch.autograd.backward(param, grad * 0.5)
        if by_backward and step % 2:
            params[step].grad = None  # The windows of this step change.
        optimizer.step()
    return {**state_of(optimizer), **dict(enumerate(p.detach().clone() for p in params))}


SIZES = {
    "streamed": (300, 307, 314, 321, 500),
    "disk": (1031, 2055, 20_000),
    "changed": (4103, 3079, 2055, 4103),
}
PLAIN = {
    "streamed": params_after(SIZES["streamed"], fraction=0.9),
    "disk": params_after(SIZES["disk"]),
    "changed": params_after(SIZES["changed"], by_backward=True),
}
FOLDER = {"optimizer_state_path": tempfile.gettempdir()}


def streamed_windows(simulation):
    place = {"offload_place": "streamed", "stream_window_bytes": 4096}
    streamed = params_after(SIZES["streamed"], simulation, 0.9, **place)
    simulation.synchronize()
    simulation.reports |= simulation.torn  # A region written during its download is a fault.
    return not differing(streamed, PLAIN["streamed"])


def disk_windows(simulation, place):
    how = {"offload_place": place, "stream_window_bytes": 32_768, **FOLDER}
    with simulated_disk(simulation):
        found = params_after(SIZES["disk"], simulation, **how)
        simulation.synchronize()
    simulation.reports |= simulation.torn
    return not differing(found, PLAIN["disk"])


def changed_windows(simulation):
    how = {"offload_mode": "overlap", "stream_window_bytes": 98_304, **FOLDER}
    with simulated_disk(simulation):
        found = params_after(SIZES["changed"], simulation, by_backward=True, **how)
        simulation.synchronize()
    return not differing(found, PLAIN["changed"])


def borrowed_by_a_save(simulation, write):
    with saves_of(simulation) as saves:
        _, _, value = transfer_and_memory(simulation, 512)
        param = torch.nn.Parameter(value)
        lent = leases.lease_tensors([])
        borrow = lent.of_device(param.device)
        readers = borrow.lease_state(value, "state"), borrow.lease_param(param, "a param")
        lent.start()
        with torch.no_grad():
            write(simulation, param)
        saves.let_go()
        read = [torch.zeros(512), torch.zeros(512)]
        try:
            for reader, memory in zip(readers, read, strict=True):
                reader.read_into(memory.view(torch.uint8))
        except RuntimeError:  # not the bits of the call
            read.clear()
        finally:
            lent.give_back()
    simulation.reports |= simulation.torn
    return [memory.eq(3).all() for memory in read] == [True, True]


def write_as_state(simulation, param):
    leases.before_writing([param])
    param.fill_(9.0)


def step_by_torch(simulation, param):
    param.grad = simulation.to_device(torch.ones(512), DEVICE)
    torch.optim.SGD([param], lr=1.0).step()


@dataclass
class Directly:
    use: Callable[[Simulation], bool]
    pace: Pace = Pace.OTHERS_FIRST

    def found(self):
        with simulated_accelerator(self.pace) as simulation:
            is_right = self.use(simulation)
        return bool(simulation.reports), not is_right


@dataclass
class InSchedule:
    schedule: Schedule

    @cached_property
    def plain(self):
        return plain_outcome(self.schedule)

    def found(self):
        plain = self.plain  # before
        run = outcome(self.schedule)
        return bool(run.reports), bool(run.wrong_bits(plain))


def rounds(*events):
    return tuple(Round(event=event) for event in ("", "", *events, ""))


LATE = (0.004,)
SCENARIOS = [
    Directly(download_of_what_is_dropped),
    Directly(upload_to_what_is_dropped),
    Directly(fetched_number),
    Directly(fetched_number, Pace.LAZY),
    Directly(download_of_a_transfer_that_is_dropped),
    Directly(release_of_what_is_on_its_way),
    Directly(streamed_windows),
    Directly(streamed_windows, Pace.LAZY),
    Directly(partial(disk_windows, place="streamed"), Pace.LAZY),
    Directly(partial(disk_windows, place="host"), Pace.LAZY),
    Directly(changed_windows),
    Directly(changed_windows, Pace.LAZY),
    Directly(partial(borrowed_by_a_save, write=write_as_state)),
    Directly(partial(borrowed_by_a_save, write=step_by_torch)),
    InSchedule(Schedule(mode="overlap", rounds=rounds(), pauses=LATE)),
    InSchedule(Schedule(mode="sync", rounds=rounds(), pipelined=False)),
    InSchedule(Schedule("hybrid", "overlap", rounds=rounds(), pauses=LATE, sets_device=False)),
    InSchedule(Schedule("hybrid", "sync", rounds=rounds("wider"))),
    InSchedule(Schedule(mode="speculative", clip=0.0, rounds=rounds("write"))),
    InSchedule(Schedule(mode="speculative", clip=0.0, rounds=rounds("wider"))),
    InSchedule(Schedule(mode="speculative", rounds=rounds(), pauses=LATE)),
    InSchedule(
        Schedule(
            fraction=1.0, bucket_bytes=64, rounds=(Round(micro=2),) * 2, pauses=LATE, releases=True
        )
    ),  # The second micro-batch may add into memory that now belongs to other buckets.
]
NEVER_WRONG = ("drain", "collect", "accelerator.on", "wait_for(job)", "was_read")
"""Waits whose removal is reported and may still give right bits. Unfinished results of the worker
are not used, or the worker finishes in time. Of two reads into one buffer, the later read runs last
at every pace."""
NEVER_WRONG_SITES = ("streaming.HostWindows.wait: self.wait_for(number)",)
"""Sites whose removal is reported, but no schedule here gives wrong bits: between two steps the
host fetches which weights differ, and waits for the device."""
MODULES = [
    name for _, name, _ in pkgutil.iter_modules(mp_optim.offload.__path__, "mp_optim.offload.")
]
MODULES += [f"mp_optim.host.{name}" for name in ("transfer", "leases")]
SITES = [
    site
    for module in MODULES
    for site in sites(module)
    if not site.text.startswith("self._changed.")
]


def test_source_scan_finds_the_waits_of_the_offload_package():
    texts = {site.text for site in SITES}
    assert {"ticket.done.synchronize()", "copies.done.synchronize()"} <= texts
    assert len(SITES) >= 15


@pytest.fixture(scope="module")
def with_every_wait(alone):
    seen = []
    for scenario in SCENARIOS:
        with called(SITES) as met:
            found = scenario.found()
        seen.append((scenario, found, met))
    return seen


BY_DAY = [
    pytest.param(site, id=str(site), marks=pytest.mark.slow if index % 10 else ())
    for index, site in enumerate(SITES)
]


@pytest.mark.repeats
@pytest.mark.parametrize("site", BY_DAY)
def test_simulated_accelerator_reports_each_wait_that_is_left_out(site, with_every_wait):
    is_reported = False
    is_wrong = str(site) in NEVER_WRONG_SITES or any(name in site.text for name in NEVER_WRONG)
    for scenario, *_ in sorted(with_every_wait, key=lambda each: site not in each[2]):
        with without(site):
            reported, wrong = scenario.found()
        is_reported, is_wrong = is_reported or reported, is_wrong or wrong
        if is_reported and is_wrong:
            return
    assert is_reported, "no schedule was reported"
    assert is_wrong, "the bits were right in every schedule"


def test_simulated_accelerator_reports_nothing_when_no_wait_is_left_out(with_every_wait):
    assert [found for _, found, _ in with_every_wait] == [(False, False)] * len(SCENARIOS)


def test_deleted_optimizer_completes_its_uploads_without_a_race():
    with simulated_accelerator() as simulation:
        param = torch.nn.Parameter(torch.ones(8))
        optimizer = HybridDeviceOptimizer([param], 1.0, FusedAdam, FusedAdam, lr=0.5)
        optimizer.stepper.use_transfer(transfer_for(device_at(DEVICE)))
        simulation.to_device(param, DEVICE)
        param.grad = simulation.to_device(torch.ones(8), DEVICE)
        optimizer.step()
        del optimizer
        gc.collect()
        transfer_and_memory(simulation)
        assert param.allclose(torch.full((8,), 0.5))
    assert not simulation.reports


@pytest.mark.parametrize("waits", [True, False])
def test_transfer_holds_source_and_target_until_the_copy_is_done(waits):
    with simulated_accelerator() as simulation:
        transfer, host, value = transfer_and_memory(simulation, 32)
        source = tensor_in(host.view(torch.uint8), 64, torch.Size([16]), torch.float32)
        target = torch.nn.Parameter(value[:16].clone(), requires_grad=False)
        ends = [simulation.memory.of(source), simulation.memory.of(target)]
        ticket = transfer.upload([target], [source])
        target.data = torch.zeros(16)
        del host, source, target
        assert [end.is_let_go for end in ends] == [False, False]
        if waits:
            transfer.wait(ticket)
        else:
            del ticket
            simulation.synchronize()
            transfer.upload([], [])  # The next copy frees the ends of completed copies.
        assert [end.is_let_go for end in ends] == [True, True]
    assert not simulation.reports


def accelerator():
    return accelerator_of(device_at(DEVICE))
