"""A background save writes the state at the time of the call, and training keeps its bits."""

import random
import threading

import pytest
import torch

import mp_optim
from mp_optim import HybridDeviceOptimizer, checkpoint
from mp_optim.apps.cli.inspect import compare
from mp_optim.checkpoint import save_load, writing
from mp_optim.checkpoint.reading import open_checkpoint
from mp_optim.host import leases
from mp_optim.host.host_share import HostShare
from support.accelerator.simulation import device_at
from support.accelerator.stand_in import simulated_accelerator
from support.models import build
from support.offload import build_mode, differing, run, snapshot

ADAM_FORMS = ("bf16", "fp16", "fp32", "bf16-8bit8", "bf16-bf16")


class Reader:
    def __init__(self, patch):
        self.go, self.held = threading.Event(), threading.Event()
        self.share, self.left = None, 0
        read_into, lend = leases.Lease.read_into, writing.lease_tensors

        def count(tensors):
            if self.share is not None:
                self.left = int(self.share * len(tensors))
            return lend(tensors)

        def read(lease, to):
            if self.share is not None:
                self.left -= 1
                if self.left < 0:
                    self.held.set()
                    assert self.go.wait(60)
            read_into(lease, to)

        patch.setattr(writing, "lease_tensors", count)
        patch.setattr(leases.Lease, "read_into", read)
        patch.setattr(writing, "LENT_FROM", 5)  # 5 bytes: all tensors except step counts

    def hold_after(self, share):
        self.share = share
        self.go.clear()
        self.held.clear()

    def release(self):
        self.share = None
        self.go.set()


@pytest.fixture
def reader(monkeypatch):
    reader = Reader(monkeypatch)
    yield reader
    reader.release()
    save_load.finish_previous()


def save_twice(tmp_path, model, optimizer, reader, share=0.0):
    reader.release()
    first = checkpoint.save(tmp_path / "now", model, optimizer)
    reader.hold_after(share)
    handle = checkpoint.save(tmp_path / "later", model, optimizer, asynchronous=True)
    assert reader.held.wait(60)
    return first, handle


def differences(a, b):
    rows = compare(open_checkpoint(a), open_checkpoint(b))
    return [row.name for row in rows if row.what != "equal"]


def assert_equal_versions(first, handle, reader):
    assert not handle.done()
    reader.release()
    assert differences(first, handle.wait()) == []
    assert differences(first, checkpoint.verify(handle.path)) == []


WAYS = ("sync", "overlap", "speculative", "streamed", "disk")


def random_settings(seed, folder):
    chance = random.Random(seed)
    mode = WAYS[seed % len(WAYS)]
    form = chance.choice(ADAM_FORMS)
    settings = {}
    if form in ("bf16", "fp32"):
        settings["optimizer"] = chance.choice(["adam", "sgd", "lion", "lamb"])
    if mode == "streamed":
        mode, settings["offload_place"] = "sync", "streamed"
    if mode == "disk":
        mode, settings["optimizer_state_path"] = "sync", str(folder)
    if chance.random() < 0.5:
        settings["ema_decay"] = 0.9
    return chance, mode, form, settings


@pytest.mark.parametrize("seed", range(10))
def test_background_save_writes_state_as_of_the_call_when_training_continues(
    tmp_path, reader, seed
):
    chance, mode, form, settings = random_settings(seed, tmp_path)
    fraction = chance.choice([0.6, 1.0])
    settings["adversarial"] = mode != "sync"
    alone, saving = (build_mode(mode, form, fraction, **settings) for _ in range(2))
    before, after = chance.randrange(2, 4), chance.randrange(1, 4)
    expected = run(*alone, before + after)
    found = run(*saving, before)
    versions = save_twice(tmp_path, *saving, reader, chance.random())
    found += run(*saving, after, start=before)
    assert_equal_versions(*versions, reader)
    assert found == expected
    assert differing(snapshot(*saving), snapshot(*alone)) == []


def write_all(optimizer):
    with torch.no_grad():
        for state in optimizer.state_dict()["state"].values():
            for value in state.values():
                value.add_(1) if value.dim() else None


def write_mains(optimizer):
    with torch.no_grad():
        for _, main in optimizer.named_main_params():
            main.mul_(2)


def write_view(optimizer):
    with torch.no_grad():
        for state in optimizer.state.values():
            state["exp_avg"].zero_()


def load_other(optimizer):
    model, other = build("bf16", 0.5, seed=9)
    run(model, other, 3)
    optimizer.load_state_dict(other.state_dict())


@pytest.mark.filterwarnings("ignore:.*did not have the values")
def scale_rows(optimizer):
    mains = optimizer.named_main_params()
    halves = {name: torch.full(main.shape[:1], 0.5) for name, main in mains}
    optimizer.scale_rows_(halves)


@pytest.mark.parametrize("write", [write_all, write_mains, write_view, load_other, scale_rows])
def test_background_save_writes_old_state_when_the_caller_changes_state(tmp_path, reader, write):
    model, optimizer = build("bf16", 0.5)
    run(model, optimizer, 2)
    versions = save_twice(tmp_path, model, optimizer, reader)
    write(optimizer)
    assert_equal_versions(*versions, reader)
    assert differences(versions[0], checkpoint.save(tmp_path / "changed", model, optimizer))


@pytest.mark.parametrize("how", ["data", "reload", "followed", "moved"])
def test_background_save_writes_old_weights_when_other_code_changes_the_model(
    tmp_path, reader, how
):
    model, optimizer = build("bf16", 0.5)
    run(model, optimizer, 2)
    versions = save_twice(tmp_path, model, optimizer, reader, 0.2)
    for param in model.parameters():
        if how == "moved":
            param.data = param.data.clone() * 2
        elif how == "followed":
            with torch.no_grad():
                param.mul_(3)
        else:
            param.data.mul_(3)
    if how == "reload":
        optimizer.reload_model_params()
    run(model, optimizer, 1, start=2)
    assert_equal_versions(*versions, reader)


def test_background_save_writes_old_state_when_the_model_moves_to_a_device(tmp_path, reader):
    with simulated_accelerator() as simulation:
        model = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
        optimizer = mp_optim.AdamW(model.parameters(), lr=0.1)

        def step():
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()

        step()
        versions = save_twice(tmp_path, model, optimizer, reader)
        model.to(device_at(0))
        step()
        assert_equal_versions(*versions, reader)
        simulation.synchronize()
        assert not simulation.reports


@pytest.mark.parametrize("then", ["step", "reload"])
def test_background_save_writes_old_state_when_a_torch_optimizer_steps(tmp_path, reader, then):
    model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = HybridDeviceOptimizer(
        model.named_parameters(),
        0.7,
        torch.optim.AdamW,
        torch.optim.AdamW,
        param_update_in_fp32=True,
        lr=0.1,
    )

    def step():
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    step()
    versions = save_twice(tmp_path, model, optimizer, reader)
    if then == "step":
        step()
    else:
        model.weight.data.mul_(2)
        optimizer.reload_model_params()
    assert_equal_versions(*versions, reader)


def test_background_save_fails_when_other_code_writes_state(tmp_path, reader):
    model, optimizer = build("bf16", 0.5)
    run(model, optimizer, 2)
    held = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
    _, handle = save_twice(tmp_path, model, optimizer, reader)
    for moment in held:
        moment.add_(1)
    reader.release()
    with pytest.raises(RuntimeError, match="other code than the optimizer wrote"):
        handle.wait()
    assert not (tmp_path / "later" / "latest").exists()


def test_speculation_pauses_while_a_background_save_reads(tmp_path, reader):
    """Every step clips, so every prediction fails and speculation pauses while the save reads."""
    model, optimizer = build_mode("speculative", "bf16", 1.0, clip_grad=1e-6)
    run(model, optimizer, 2)
    versions = save_twice(tmp_path, model, optimizer, reader)
    run(model, optimizer, 10, start=2)
    assert optimizer.metrics()["speculation_paused"] > 0
    assert_equal_versions(*versions, reader)


def use_small_files(monkeypatch):
    monkeypatch.setattr(writing, "FILE_FROM", 1 << 10)
    share = HostShare(8, "as the test says")
    monkeypatch.setattr(writing, "host_share", lambda: share)


def test_save_into_several_files_has_the_contents_of_a_save_into_one_file(tmp_path, monkeypatch):
    model, optimizer = build("bf16", 0.5)
    run(model, optimizer, 1)
    one = checkpoint.save(tmp_path / "one", model, optimizer)
    use_small_files(monkeypatch)
    for way in (False, True):
        saved = checkpoint.save(tmp_path / f"{way}", model, optimizer, asynchronous=way)
        several = saved.wait() if way else saved
        assert len(list(several.glob("*.distcp"))) > 1
        assert differences(one, several) == [] and checkpoint.verify(several)
    other = build("bf16", 0.5, seed=3)
    checkpoint.load(several, *other, verify=True)
    assert differing(snapshot(*other), snapshot(model, optimizer)) == []


def test_save_leaves_no_file_when_one_of_several_files_cannot_be_written(tmp_path, monkeypatch):
    model, optimizer = build("bf16", 0.5)
    run(model, optimizer, 1)
    use_small_files(monkeypatch)
    opened = writing.Path.open

    def refused(path, *arguments, **named):
        if path.name == "__0_1.distcp":
            raise OSError(28, "No space left on device", str(path))
        return opened(path, *arguments, **named)

    monkeypatch.setattr(writing.Path, "open", refused)
    with pytest.raises(OSError, match=r"__0_1\.distcp"):
        checkpoint.save(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == []
