"""Version folders for ``pull_weights``, read by a receiver that follows the description of the
format: slime 624b824a, docs/en/advanced/delta-weight-sync.md and
docker/patch/latest/sglang-pull_weights.patch; vime 2b83ea20,
docker/patch/latest/vllm-pull_weights.patch."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import mp_optim
from mp_optim.apps.deltas import DeltaQuantizer, quantized_weights, save_disk_version
from support.deltas import PublishedRun, assert_equal_bits

NAMES = "*_proj.weight"


class LocalCheckpoint:
    """A checkpoint of an engine's host, as bytes by name.

    A pull starts at the newest folder without metadata of deltas, which is a whole checkpoint, if
    that is newer than the engine's version. Then it applies the following versions in order.

    A version folder is a Hugging Face checkpoint: an index with the metadata of the version, and
    safetensors files. A tensor of a file is a compressed payload; the file's metadata has the
    checksum of the new tensor. A payload has the number of changed bytes, their positions, and
    their values; numbers are little-endian uint32.

    The format compresses by zstd. The tests compress by zlib, because the caller brings the
    compressor.
    """

    def __init__(self, base: Path) -> None:
        self.tensors, self.version = load_file(base), 0

    def pull(self, folder: Path, target: int) -> None:
        folders = [folder / f"weight_v{version:06d}" for version in range(target + 1)]
        whole = [at for at, path in enumerate(folders) if (path / "model.safetensors").exists()]
        if whole and whole[-1] > self.version:
            self.version = whole[-1]
            self.tensors = load_file(folders[self.version] / "model.safetensors")
        for path in folders[self.version + 1 :]:
            self._apply(path)

    def _apply(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        said = index["metadata"]
        assert said["delta_encoding"] == "overwrite" and said["compression_format"] == "zstd"
        assert int(said["base_version"]) == self.version
        assert said["checksum_format"] == "adler32"
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    assert index["weight_map"][name] == path.name
                    self._overwrite(name, file.get_tensor(name), file.metadata()[name])
        self.version = int(said["version"])

    def _overwrite(self, name: str, payload: torch.Tensor, checksum: str) -> None:
        assert payload.dtype == torch.uint8 and payload.ndim == 1
        content = zlib.decompress(bytes(payload.tolist()))
        count = int.from_bytes(content[:4], "little")
        values = content[4 + 4 * count :]
        memory = bytearray(self.tensors[name].view(torch.uint8).flatten().tolist())
        for at in range(count):
            memory[int.from_bytes(content[4 + 4 * at : 8 + 4 * at], "little")] = values[at]
        assert len(values) == count and f"{zlib.adler32(memory):08x}" == checksum
        old = self.tensors[name]
        self.tensors[name] = torch.frombuffer(memory, dtype=old.dtype).view(old.shape)


def trainer():
    torch.manual_seed(0)
    model = nn.ModuleDict({"q_proj": nn.Linear(20, 300), "o_proj": nn.Linear(30, 7)}).bfloat16()
    optimizer = mp_optim.AdamW(model.named_parameters(), lr=1e-4)
    optimizer.track_changes()
    return model, optimizer


def step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer.changed_weights()


@pytest.mark.parametrize("form", [None, "fp8_block", "fp8_row"])
def test_save_disk_version_updates_a_checkpoint_of_an_engine_to_the_published_weights(
    tmp_path, form
):
    model, optimizer = trainer()

    def published():
        if form is None:
            return {name: param.detach() for name, param in model.named_parameters()}
        return quantized_weights(model, form, NAMES)

    save_file({name: tensor.clone() for name, tensor in published().items()}, tmp_path / "base")
    quantizer = DeltaQuantizer(form or "fp8_row", NAMES)
    quantizer.quantize(optimizer.changed_weights(full=True), model)
    for version in range(1, 6):
        delta = step(model, optimizer)
        delta = delta if form is None else quantizer.quantize(delta, model)
        found = save_disk_version(
            tmp_path / "all", delta, published(), version=version, compress=zlib.compress
        )
        assert found == tmp_path / "all" / f"weight_v{version:06d}"
    assert len([*(tmp_path / "all").iterdir()]) == 5
    engine = LocalCheckpoint(tmp_path / "base")
    for target in (2, 5):
        engine.pull(tmp_path / "all", target)
    assert_equal_bits({name: engine.tensors[name] for name in published()}, published())


def test_save_disk_version_updates_late_engines_from_the_newest_whole_checkpoint(tmp_path):
    run, versions = PublishedRun(0, tmp_path), tmp_path / "all"
    save_file(run.weights(), tmp_path / "base")
    engine, late = (LocalCheckpoint(tmp_path / "base") for _ in range(2))
    for version in range(1, 31):
        run.train()
        if version % 12 == 0:
            run.resume()
            run.publish(full=True)
            (versions / f"weight_v{version:06d}").mkdir()
            save_file(run.weights(), versions / f"weight_v{version:06d}" / "model.safetensors")
        else:
            settings = {"version": version, "compress": zlib.compress}
            save_disk_version(versions, run.publish(), run.weights(), **settings)
        if version % 4 == 0:
            engine.pull(versions, version)
            assert_equal_bits({n: engine.tensors[n] for n in run.weights()}, run.weights())
    late.pull(versions, 30)
    assert_equal_bits({name: late.tensors[name] for name in run.weights()}, run.weights())


def test_save_disk_version_refuses_full_publications_and_weights_newer_than_the_delta(tmp_path):
    model, optimizer = trainer()
    settings = {"version": 1, "compress": zlib.compress}
    full = optimizer.changed_weights(full=True)
    with pytest.raises(ValueError, match=r"save_pretrained\(\) to .*weight_v000001"):
        save_disk_version(tmp_path, full, model, **settings)
    delta = step(model, optimizer)
    step(model, optimizer)
    with pytest.raises(ValueError, match="differs from the values in publication 2"):
        save_disk_version(tmp_path, delta, model, **settings)
    assert not [*tmp_path.iterdir()]


def test_save_disk_version_refuses_an_existing_version_and_writes_nothing(tmp_path):
    model, optimizer = trainer()
    delta = step(model, optimizer)
    written = save_disk_version(tmp_path, delta, model, version=1, compress=zlib.compress)
    before = {path.name: path.read_bytes() for path in written.iterdir()}
    with pytest.raises(FileExistsError, match=r"weight_v000001 exists.*next version"):
        save_disk_version(tmp_path, delta, model, version=1, compress=zlib.compress)
    assert [*tmp_path.iterdir()] == [written]
    assert {path.name: path.read_bytes() for path in written.iterdir()} == before
