"""A background save of a simulated device writes the state at the time of the call, and the call
does not wait for the device."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch

from mp_optim import checkpoint
from mp_optim.apps.cli.inspect import compare
from mp_optim.apps.megatron.adapter import MegatronAdapter
from mp_optim.checkpoint import save_load
from mp_optim.checkpoint.reading import open_checkpoint
from mp_optim.host import leases
from mp_optim.host.accelerator import accelerator_of
from support.accelerator.saves import saves_of
from support.accelerator.schedules import DEVICE, Round, Run, Schedule
from support.accelerator.simulation import COLLECTIVES, device_at
from support.accelerator.stand_in import simulated_accelerator
from support.accelerator.streams import Pace
from support.offload import differing
from support.one_rank import one_rank

pytestmark = [pytest.mark.native, pytest.mark.filterwarnings("ignore::UserWarning")]
BEFORE, AFTER = 2, 2


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank(COLLECTIVES):
        yield


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not leases.borrows


def differences(a, b):
    rows = compare(open_checkpoint(a), open_checkpoint(b))
    return [row.name for row in rows if row.what != "equal"]


def trained(schedule, simulation=None):
    run = Run(schedule, simulation)
    for number in range(BEFORE):
        run.round(number, Round())
    return run


def saved_plainly(run, folder):
    return checkpoint.save(folder, run.model, run.optimizer)


@contextmanager
def on_device(schedule, folder, smallest=5):
    with (
        simulated_accelerator(schedule.pace) as simulation,
        saves_of(simulation, smallest) as saves,
    ):
        run = trained(schedule, simulation)
        saves.hold()
        handle = checkpoint.save(folder, run.model, run.optimizer, asynchronous=True)
        saves.waits = 0
        yield run, handle, saves
        saves.let_go()
        save_load.finish_previous(raise_errors=False)
    reports = {**simulation.reports, **simulation.torn}
    assert not reports, "\n".join(reports)


SCHEDULES = [
    Schedule(mode="sync", fraction=0.3),
    Schedule(mode="speculative", fraction=1.0, pace=Pace.OTHERS_FIRST),
    Schedule(mode="overlap", precision="fp32", fraction=0.6, pace=Pace.RANDOM),
    Schedule("zero", "sync", fraction=1.0, pace=Pace.OTHERS_FIRST),
    Schedule("zero", "overlap", fraction=0.4),
    Schedule(mode="sync", fraction=1.0, place="streamed"),
]


def name_of(schedule):
    return f"{schedule.owner} {schedule.mode} {schedule.place} {schedule.fraction}"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_background_save_writes_device_state_as_of_the_call(tmp_path, schedule):
    plain = trained(schedule.plain)
    expected = saved_plainly(plain, tmp_path / "plain")
    with on_device(schedule, tmp_path / "later") as (run, handle, saves):
        for number in range(BEFORE, BEFORE + AFTER):
            run.round(number, Round())
            plain.round(number, Round())
        assert saves.waits
        assert differences(expected, handle.wait()) == []
        run.simulation.synchronize()
        assert not differing(run.outcome(), plain.outcome())
    assert checkpoint.verify(handle.path)


def test_background_save_call_does_not_wait_for_the_device(tmp_path):
    with simulated_accelerator() as simulation, saves_of(simulation) as saves:
        model = torch.nn.Linear(16, 16)
        for param in model.parameters():
            simulation.to_device(param, DEVICE)
        accelerator = accelerator_of(device_at(DEVICE))
        stream = accelerator.stream(device_at(DEVICE))
        stream.wait_stream(accelerator.current_stream())
        with torch.no_grad(), accelerator.queue_on(stream):
            model.weight.mul_(2)  # The device has not run this multiplication yet.
            doubled = model.weight.detach() + 0
            handle = checkpoint.save(tmp_path, model, None, asynchronous=True)
        assert stream.core.done < stream.core.queued
        saves.let_go()
        saved = open_checkpoint(handle.wait()).read("model.weight")
        simulation.synchronize()
        assert saved.equal(doubled)
    assert not simulation.reports


def write_averages(run):
    with run.optimizer.averaged_weights():
        run.simulation.synchronize()


@cache
def other_state():
    other = Run(Schedule(fraction=1.0).plain, None)
    other.round(7, Round())
    return other.optimizer.state_dict()


def load_other(run):
    run.optimizer.load_state_dict(other_state())


def step_in_parts(run):
    for param in run.model.parameters():
        param.grad = run.simulation.to_device(torch.ones_like(param), DEVICE)
    face = MegatronAdapter(run.optimizer)
    face.prepare_grads()
    face.clip_grad_norm(1.0)
    assert face.step_with_ready_grads()


def scale_rows(run):
    mains = run.optimizer.named_main_params()
    halves = {name: torch.full(main.shape[:1], 0.5) for name, main in mains}
    run.optimizer.scale_rows_(halves)


def write_what_is_handed_out(run):
    with torch.no_grad():
        for _, main in run.optimizer.named_main_params():
            main.mul_(2)


def step_by_torch(run):
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
    optimizer.step()


def write_after_waiting(run, handle):
    with pytest.raises(TimeoutError, match="not yet copied from the device"):
        handle.wait_for_device(0.01)
    handle.wait_for_device()
    run.model.dense.data.mul_(2)


WRITERS = [
    write_averages,
    load_other,
    scale_rows,
    write_what_is_handed_out,
    step_by_torch,
    step_in_parts,
]
"""Functions that write the model or its state on the device outside of a step."""


@pytest.mark.parametrize(
    ("write", "place"),
    [
        *((write, {}) for write in [*WRITERS, write_after_waiting]),
        (step_in_parts, {"is_on_disk": True}),
        (step_in_parts, {"place": "streamed"}),
        (step_in_parts, {"place": "streamed", "is_on_disk": True}),
    ],
)
def test_code_that_writes_state_waits_for_a_background_save_of_device_tensors(
    tmp_path, write, place
):
    fraction = 0.3 if write is write_what_is_handed_out else 1.0
    schedule = Schedule(fraction=fraction, mode="sync", averages=write is write_averages, **place)
    expected = saved_plainly(trained(schedule.plain), tmp_path / "plain")
    other_state()  # Cached here, because its step would wait for the save, too.
    with on_device(schedule, tmp_path / "later") as (run, handle, saves):
        write(run, handle) if write is write_after_waiting else write(run)
        run.simulation.synchronize()
        assert saves.waits
        assert differences(expected, handle.wait()) == []


def test_background_save_fails_when_code_writes_through_param_data(tmp_path):
    with simulated_accelerator() as simulation, saves_of(simulation) as saves:
        run = trained(Schedule(fraction=1.0), simulation)
        handle = checkpoint.save(tmp_path, run.model, run.optimizer, asynchronous=True)
        run.model.dense.data.mul_(2)  # A write through .data does not raise the tensor's version.
        simulation.synchronize()
        saves.let_go()
        with pytest.raises(RuntimeError, match=r"model\.dense: code outside .* wait_for_device"):
            handle.wait()
        run.round(BEFORE, Round())
    assert not simulation.reports and simulation.torn
    assert not (tmp_path / "latest").exists()


def test_training_continues_when_copies_of_a_background_save_fail(tmp_path):
    schedule = Schedule(mode="sync", fraction=0.3)
    with on_device(schedule, tmp_path) as (run, handle, saves):
        with pytest.MonkeyPatch.context() as patch:

            def refuse(*_):
                raise RuntimeError("an illegal memory access")

            patch.setattr(saves.windows.transfer, "download", refuse)
            run.round(BEFORE, Round())
            with pytest.raises(RuntimeError, match="device failed: an illegal memory"):
                handle.wait()
        assert not leases.borrows
        again = checkpoint.save(tmp_path, run.model, run.optimizer, asynchronous=True)
        assert checkpoint.verify(again.wait())


def test_background_save_reuses_page_locked_memory_and_frees_the_model(tmp_path, monkeypatch):
    sizes = []
    with simulated_accelerator() as simulation, saves_of(simulation) as saves:
        transfer = saves.windows.transfer
        empty_host = transfer.empty_host

        def counted(num_bytes, pin):
            sizes.append(num_bytes)
            return empty_host(num_bytes, pin)

        monkeypatch.setattr(transfer, "empty_host", counted)
        for value in (3.0, 5.0):
            model = torch.nn.Linear(64, 64, bias=False)
            param = simulation.to_device(model.weight, DEVICE)
            with torch.no_grad():
                param.fill_(value)
            saves.hold()
            handle = checkpoint.save(tmp_path, model, None, asynchronous=True)
            region = simulation.memory.of(param)
            del model, param
            assert not region.is_let_go
            saves.let_go()
            saved = open_checkpoint(handle.wait()).read("model.weight")
            assert saved.eq(value).all() and region.is_let_go
    assert not simulation.reports
    assert len(sizes) <= 3 and set(sizes) == {640}
