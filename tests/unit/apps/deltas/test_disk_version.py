"""Version folders for sglang's ``/pull_weights``, read by a receiver that follows the description
of the format: slime 624b824a, docs/en/advanced/delta-weight-sync.md, and the receiver in its
docker/patch/latest/sglang-pull_weights.patch."""

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
from mp_optim.core.weight_delta import bits_differ

NAMES = "*_proj.weight"


class LocalCheckpoint:
    """A checkpoint of an engine's host, as bytes by name.

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
        for version in range(self.version + 1, target + 1):
            self._apply(folder / f"weight_v{version:06d}")

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
    assert all(not bits_differ(engine.tensors[n], t).numel() for n, t in published().items())


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
