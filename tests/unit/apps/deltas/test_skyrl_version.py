"""Version folders for SkyRL, read by a receiver that follows the receiver's own code: SkyRL
a9564572, skyrl/backends/skyrl_train/weight_sync/delta_checkpoint.py and delta_payload.py."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mp_optim.apps.deltas import save_skyrl_version
from support.deltas import PublishedRun, assert_equal_bits


class LocalCheckpoint:
    """A worker's copy of the base checkpoint.

    A worker applies all versions after its own, in order. A version folder has ``manifest.json``
    and its payload files. A payload is a uint8 tensor: the compressed XOR of the old and the new
    bytes of one tensor. The manifest has the checksum of the new bytes.

    The format compresses by zstd. The tests compress by zlib, because the caller brings the
    compressor.
    """

    def __init__(self, base: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in base.items()}
        self.version = 0

    def fetch(self, folder: Path, target: int) -> None:
        while self.version < target:
            self._apply(folder / f"delta-{self.version + 1:08d}")

    def _apply(self, folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["base_version"] == self.version
        self.version = manifest["version"]
        assert self.version == int(folder.name.removeprefix("delta-"))
        assert {path.name for path in folder.iterdir()} == {
            "manifest.json",
            *manifest["payload_files"],
        }
        for record in manifest["tensors"]:
            with safe_open(folder / record.pop("payload_file"), framework="pt") as file:
                payload = file.get_tensor(record.pop("payload_key"))
            self._xor(payload, **record)
        sizes = [record["uncompressed_num_bytes"] for record in manifest["tensors"]]
        assert manifest["total_uncompressed_num_bytes"] == sum(sizes)
        sizes = [record["compressed_num_bytes"] for record in manifest["tensors"]]
        assert manifest["total_compressed_num_bytes"] == sum(sizes)

    def _xor(
        self,
        payload: Tensor,
        name: str,
        dtype: str,
        shape: list[int],
        uncompressed_num_bytes: int,
        compressed_num_bytes: int,
        checksum: str,
        checksum_algorithm: str,
    ) -> None:
        old = self.tensors[name]
        assert payload.dtype == torch.uint8 and payload.numel() == compressed_num_bytes
        assert f"torch.{dtype}" == str(old.dtype) and shape == [*old.shape]
        change = zlib.decompress(bytes(payload.tolist()))
        memory = bytearray(old.view(-1).view(torch.uint8).tolist())
        assert len(change) == len(memory) == uncompressed_num_bytes
        for at, bits in enumerate(change):
            memory[at] ^= bits
        assert checksum_algorithm == "sha256" and hashlib.sha256(memory).hexdigest() == checksum
        self.tensors[name] = torch.frombuffer(memory, dtype=old.dtype).view(old.shape)


@pytest.mark.parametrize("seed", range(3))
def test_save_skyrl_version_updates_workers_to_the_published_weights(tmp_path, seed):
    run, folder = PublishedRun(seed, tmp_path), tmp_path / "sync"
    base = run.weights()
    worker, replica, after = LocalCheckpoint(base), run.weights(), None
    for version in range(1, 31):
        run.train()
        if is_resumed := version % 12 == 0:
            run.resume()
            # The publisher's copy is lost with its process.
            publisher = LocalCheckpoint(base)
            publisher.fetch(folder, version - 1)
            replica, after = publisher.tensors, None
        parts, settings = run.publish(is_resumed), {"version": version, "compress": zlib.compress}
        after = save_skyrl_version(folder, parts, replica, after, **settings)
        assert_equal_bits(replica, run.weights())
        if version % 4 == 0:
            worker.fetch(folder, version)
            assert_equal_bits(worker.tensors, run.weights())
    assert run.skipped > 0
    late = LocalCheckpoint(base)
    late.fetch(folder, 30)
    assert_equal_bits(late.tensors, run.weights())


def test_save_skyrl_version_refuses_a_gap_before_it_writes(tmp_path):
    run = PublishedRun(0, tmp_path)
    replica = run.weights()
    run.publish()
    with pytest.raises(ValueError, match="no publication was applied"):
        save_skyrl_version(
            tmp_path / "sync", run.publish(), replica, version=1, compress=zlib.compress
        )
    assert not (tmp_path / "sync").exists()


@pytest.mark.parametrize("version", [0, -3, True, "1", 1.0])
def test_save_skyrl_version_refuses_versions_that_are_no_integers_from_1(tmp_path, version):
    run, folder = PublishedRun(0, tmp_path), tmp_path / "sync"
    replica = run.weights()
    with pytest.raises(ValueError, match=r"^version=.*: versions are integers from 1"):
        save_skyrl_version(folder, run.publish(), replica, version=version, compress=zlib.compress)
    assert not folder.exists()


def test_save_skyrl_version_refuses_an_existing_version_and_writes_nothing(tmp_path):
    run, folder = PublishedRun(0, tmp_path), tmp_path / "sync"
    replica = run.weights()
    run.train()
    first = run.publish()
    after = save_skyrl_version(folder, first, replica, version=1, compress=zlib.compress)
    run.train()
    second, before = run.publish(), {name: one.clone() for name, one in replica.items()}
    with pytest.raises(FileExistsError, match=r"^version=1: .* exists .*; pass version=2"):
        save_skyrl_version(folder, second, replica, after, version=1, compress=zlib.compress)
    assert [path.name for path in folder.iterdir()] == ["delta-00000001"]
    assert_equal_bits(replica, before)
    save_skyrl_version(folder, second, replica, after, version=2, compress=zlib.compress)
    assert_equal_bits(replica, run.weights())
