"""A load of a damaged checkpoint raises and changes nothing, or returns the saved values."""

import errno
import io
import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mp_optim import checkpoint
from mp_optim.checkpoint import writing
from mp_optim.checkpoint.file_format import BLOCK_BYTES
from mp_optim.checkpoint.reading import open_checkpoint
from support.layouts import Layout
from support.layouts import train as train_layout
from support.models import build, train
from support.prints import print_of


class DamagedCopy:
    def __init__(self, version):
        self.version, self.copy = version, version.parent.parent / "damaged"
        shutil.copytree(version.parent, self.copy)
        self.whole = build("bf16-8bit", 0.5, seed=5)
        checkpoint.load(version, *self.whole)
        self.saved = print_of(*self.whole)
        self.target = build("bf16-8bit", 0.5, seed=7)

    def file(self, name):
        return self.copy / name if name == "latest" else self.copy / self.version.name / name

    def load(self, **settings):
        before = print_of(*self.target)
        try:
            checkpoint.load(self.copy, *self.target, **settings)
        except (ValueError, FileNotFoundError) as error:
            assert print_of(*self.target) == before, f"half replaced: {error}"
            return error
        assert print_of(*self.target) == self.saved
        train(*self.target, 1)
        return None


@pytest.fixture(scope="module")
def damaged_copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged_copy")
    model, optimizer = build("bf16-8bit", 0.5)
    train(model, optimizer, 2)
    return DamagedCopy(checkpoint.save(folder / "one", model, optimizer, extra={"step": 2}))


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_load_changes_nothing_when_any_file_is_damaged(damaged_copy, data):
    names = ["latest", *sorted(os.listdir(damaged_copy.version))]
    path = damaged_copy.file(data.draw(st.sampled_from(names)))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "flip", "flip", "cut", "zeros", "twice"]))
    damaged = bytearray(content)
    if how == "flip":
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "zeros":
        damaged[at : at + 64] = bytes(len(damaged[at : at + 64]))
    else:
        damaged = damaged[:at] if how == "cut" else damaged + damaged[at:]
    path.write_bytes(damaged)
    try:
        damaged_copy.load(verify=data.draw(st.booleans()))
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("elements", [1, BLOCK_BYTES // 4 + 3, 5 * BLOCK_BYTES // 8])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_load_finds_a_flipped_bit_in_every_block_of_a_tensor(tmp_path, elements, place):
    model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.randn(elements))})
    version = checkpoint.save(tmp_path, model, None)
    index = json.loads((version / "index.json").read_text())
    start = index["entries"]["model.a"][3]
    with (version / "__0_0.distcp").open("r+b") as file:
        file.seek(start + int(place * (4 * elements - 1)))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    before = model["a"].detach().clone()
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged"):
        checkpoint.load(version, model, None)
    assert torch.equal(model["a"], before)


def test_torch_distributed_checkpoint_reads_our_checkpoints(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, optimizer = Layout("plain").build(seed=1)
    train_layout(model, optimizer, range(2))
    version = checkpoint.save(tmp_path / "a", model, optimizer)
    contents = open_checkpoint(version)
    found = {
        name: torch.zeros(entry.shape, dtype=entry.dtype)
        for name, entry in contents.entries.items()
    }
    dcp.load(found, checkpoint_id=str(version), no_dist=True)
    for name, value in found.items():
        assert torch.equal(value, contents.read(name)), name
    dcp_to_torch_save(version, tmp_path / "all.pt")
    every = torch.load(tmp_path / "all.pt", weights_only=True)
    assert every.keys() == found.keys()
    assert all(torch.equal(every[name], found[name]) for name in found)


class FullDisk(io.FileIO):
    left = 0

    def write(self, data):
        if len(memoryview(data)) > FullDisk.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.left -= len(memoryview(data))
        return super().write(data)


@pytest.mark.parametrize("room", [0, 5_000, 25_000])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_raises_enospc_and_keeps_the_last_version_when_the_disk_is_full(
    tmp_path, monkeypatch, room, asynchronous
):
    held = build("bf16", 0.5)
    checkpoint.save(tmp_path, *held, extra={"n": 1})
    FullDisk.left = room
    with monkeypatch.context() as patch:
        patch.setattr(
            writing.Path,
            "open",
            lambda path, mode="r", *_, **__: FullDisk(path, mode.replace("b", "")),
        )
        with pytest.raises(
            OSError, match=r"No space left on device: '.*version-2.incomplete/"
        ) as found:
            if asynchronous:
                checkpoint.save(tmp_path, *held, asynchronous=True).wait()
            else:
                checkpoint.save(tmp_path, *held)
    assert found.value.errno == errno.ENOSPC
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "version-1"]
    assert checkpoint.load(tmp_path, *held) == {"n": 1}
    assert checkpoint.save(tmp_path, *held).name == "version-2"
