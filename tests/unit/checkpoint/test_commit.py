"""Files of a checkpoint: complete versions, retention, checksums, errors, background saves."""

import os
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

from mp_optim import checkpoint
from mp_optim.checkpoint import commit, save_load, writing
from support.models import build, same_bits, train


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    assert [name for name, value in expected.items() if not same_bits(found[name], value)] == []


@pytest.fixture
def trained():
    model, optimizer = build("bf16", 0.5)
    train(model, optimizer, 2)
    return model, optimizer


def names(root):
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (None, [1, 2, 3, 4, 5])]
)
def test_save_deletes_oldest_versions_beyond_keep(tmp_path, trained, keep, left):
    for step in range(5):
        path = checkpoint.save(tmp_path, *trained, extra={"step": step}, keep=keep)
        assert path.name == f"version-{step + 1}"
    assert names(tmp_path) == ["latest", *(f"version-{number}" for number in left)]
    assert [path.name for path in checkpoint.versions(tmp_path)] == [
        f"version-{number}" for number in left
    ]
    assert checkpoint.load(tmp_path / f"version-{left[0]}", *build("bf16")) == {"step": left[0] - 1}


def test_commit_syncs_every_file_before_publishing(tmp_path, trained, monkeypatch):
    lengths, fsync = {}, os.fsync

    def noted(descriptor):
        found = os.fstat(descriptor)
        lengths[found.st_ino] = found.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = checkpoint.save(tmp_path, *trained)
    files = [file for file in [tmp_path / "latest", *path.rglob("*")] if file.is_file()]
    assert len(files) > 3
    for file in files:
        assert lengths[file.stat().st_ino] == file.stat().st_size, file


def test_save_deletes_files_of_interrupted_saves(tmp_path, trained):
    checkpoint.save(tmp_path, *trained, extra={"step": 1})
    for left in (".version-7.incomplete", ".version-0.deleted"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "manifest.json").write_text("{}")
    assert checkpoint.load(tmp_path, *build("bf16")) == {"step": 1}
    checkpoint.save(tmp_path, *trained)
    assert names(tmp_path) == ["latest", "version-2"]


def test_load_names_complete_versions_when_a_manifest_is_missing(tmp_path, trained):
    checkpoint.save(tmp_path, *trained, keep=None)
    checkpoint.save(tmp_path, *trained, keep=None)
    (tmp_path / "version-2" / "manifest.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"names version-2, which is missing or not complete.*version-1"
    ):
        checkpoint.load(tmp_path, *build("bf16"))
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(tmp_path / "version-2", *build("bf16"))
    (tmp_path / "latest").unlink()
    with pytest.raises(FileNotFoundError, match=r"file latest, .* is missing.*version-1"):
        checkpoint.load(tmp_path, *build("bf16"))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.json"])
def test_verify_and_load_name_the_damaged_file(tmp_path, trained, name):
    version = checkpoint.save(tmp_path, *trained)
    assert checkpoint.verify(tmp_path) == version
    content = (version / name).read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    (version / name).write_bytes(flipped)
    other, fresh = build("bf16", seed=3)
    before = weights(other)
    with pytest.raises(ValueError, match=rf"checksums of \['{name}'\]"):
        checkpoint.verify(tmp_path)
    with pytest.raises(ValueError, match="checksums"):
        checkpoint.load(tmp_path, other, fresh, verify=True)
    for damage, text in (
        (content[:-1], f"{name}: {len(content) - 1}, expected {len(content)}"),
        (None, "missing"),
    ):
        (version / name).unlink() if damage is None else (version / name).write_bytes(damage)
        with pytest.raises(ValueError, match=text):
            checkpoint.load(tmp_path, other, fresh)
    assert_same(weights(other), before)


def test_load_error_lists_missing_unexpected_and_mis_shaped_tensors(tmp_path):
    def module(**shapes):
        return nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        )

    checkpoint.save(tmp_path, module(a=2, b=3, c=(4, 1)), None)
    with pytest.raises(
        ValueError,
        match=r"missing \['model.d'\], unexpected \['model.a'\], "
        r"mis-shaped \['model.c: saved \(4, 1\), expected \(4, 2\)'\]; load the checkpoint into",
    ):
        checkpoint.load(tmp_path, module(b=3, c=(4, 2), d=1), None)
    with pytest.raises(
        ValueError, match=r"of another dtype \['model.a: saved torch.float32, expected torch.bf"
    ):
        checkpoint.load(tmp_path, module(a=2, b=3, c=(4, 1)).bfloat16(), None)
    checkpoint.load(tmp_path, module(a=2, b=3, c=(4, 1)).bfloat16(), None, convert=True)


def test_reload_model_params_updates_main_params_after_a_load_without_an_optimizer(
    tmp_path, trained
):
    model, optimizer = trained
    checkpoint.save(tmp_path, model, optimizer, extra={"step": 2})
    other, fresh = build("bf16", 1.0, seed=5)
    train(other, fresh, 1)
    moments = {
        key: value.clone()
        for key, value in fresh.state[other.dense].items()
        if key.startswith("exp")
    }
    assert checkpoint.load(tmp_path, other, None) == {"step": 2}
    fresh.reload_model_params()
    expected = weights(model)
    assert_same(weights(other), expected)
    assert_same(
        {name: main.to(expected[name].dtype) for name, main in fresh.named_main_params()}, expected
    )
    assert_same(fresh.state[other.dense], moments)


def test_load_names_missing_state_when_the_model_was_saved_without_an_optimizer(tmp_path, trained):
    checkpoint.save(tmp_path, trained[0], None)
    checkpoint.load(tmp_path, build("bf16", seed=2)[0], None)
    with pytest.raises(ValueError, match=r"missing \['optimizer.state.exp_avg.bias'"):
        checkpoint.load(tmp_path, *build("bf16"))


def test_checkpoint_restores_extra_state_of_model_chunks(tmp_path):
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    chunks = [Counting(2, 2), Counting(2, 2)]
    chunks[0].seen, chunks[1].seen = 3, 4
    checkpoint.save(tmp_path, chunks, None)
    other = [Counting(2, 2), Counting(2, 2)]
    checkpoint.load(tmp_path, other, None)
    assert [chunk.seen for chunk in other] == [3, 4]
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(chunks, other, strict=True))


@pytest.fixture
def gate(monkeypatch):
    opened = threading.Event()
    write = writing.Writing.write

    def held(self):
        assert opened.wait(60)
        return write(self)

    monkeypatch.setattr(writing.Writing, "write", held)
    yield opened
    opened.set()
    with suppress(RuntimeError):  # Raised again if the test made the save fail.
        save_load.finish_previous()


def test_save_waits_for_the_previous_save_of_a_path(tmp_path, gate, trained):
    first = checkpoint.save(tmp_path, *trained, extra={"n": 1}, asynchronous=True)
    threading.Timer(0.2, gate.set).start()
    begun = time.monotonic()
    second = checkpoint.save(tmp_path, *trained, extra={"n": 2}, asynchronous=True)
    assert time.monotonic() - begun > 0.1 and first.done()
    assert checkpoint.load(tmp_path, *build("bf16")) == {"n": 2}  # A load waits for the save, too.
    assert second.done()


@pytest.mark.parametrize("waited", [False, True])
def test_failed_background_save_is_raised_once_by_wait_or_by_the_next_save(
    tmp_path, monkeypatch, trained, waited
):
    def full(*_):
        raise OSError(28, "No space left on device")

    checkpoint.save(tmp_path, *trained, extra={"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(writing.Writing, "write", full)
        handle = checkpoint.save(tmp_path, *trained, extra={"n": 2}, asynchronous=True)
        if waited:
            with pytest.raises(OSError, match="No space"):
                handle.wait()
        assert checkpoint.load(tmp_path, *build("bf16")) == {"n": 1}
    assert names(tmp_path) == ["latest", "version-1"]  # The failed version leaves no files.
    if not waited:
        with pytest.raises(RuntimeError, match=r"background save of .*version-2 failed.*No space"):
            checkpoint.save(tmp_path, *trained, extra={"n": 3})
    checkpoint.save(tmp_path, *trained, extra={"n": 4})
    assert checkpoint.load(tmp_path, *build("bf16")) == {"n": 4}


def test_versions_exclude_a_half_deleted_version(tmp_path, trained, monkeypatch):
    checkpoint.save(tmp_path, *trained)
    monkeypatch.setattr(commit.shutil, "rmtree", lambda *_, **__: None)
    checkpoint.save(tmp_path, *trained)
    assert [path.name for path in checkpoint.versions(tmp_path)] == ["version-2"]
