"""Folders of checkpoint versions, and the sizes of exported files."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mp_optim import checkpoint, get_megatron_optimizer
from mp_optim.checkpoint.commit import begin, complete_versions, staging_of
from mp_optim.checkpoint.file_format import MANIFEST
from mp_optim.config import OptimizerConfig


def version(root, number):
    folder = root / f"version-{number}"
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    return folder


def test_versions_are_sorted_by_number(tmp_path):
    made = [version(tmp_path, number) for number in (9, 10, 2, 100)]
    for name in ("version-x", "version-3.old", ".version-7.incomplete", "version-200"):
        (tmp_path / name).mkdir()  # None of these folders is a complete version.
    assert (
        complete_versions(tmp_path)
        == [made[2], made[0], made[1], made[3]]
        == checkpoint.versions(tmp_path)
    )
    target = begin(tmp_path)
    assert target.name == "version-201"  # Version 200 is not complete, but its number is taken.
    assert (
        not target.exists()
        and staging_of(target).is_dir()
        and not (tmp_path / ".version-7.incomplete").exists()
    )
    assert (tmp_path / "version-3.old").is_dir()


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (40, ["ab", "c", "d"]),
        (39, ["a", "b", "c", "d"]),
        (1, ["a", "b", "c", "d"]),
        (136, ["abc", "d"]),
        (139, ["abc", "d"]),
        (140, ["abcd"]),
    ],
)
def test_export_safetensors_fills_each_file_up_to_the_limit(tmp_path, limit, files):
    sizes = {
        "a": 5,
        "b": 5,
        "c": 24,
        "d": 1,
    }  # FP32 elements; "c" needs 96 bytes, more than the smaller limits.
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name, size in sizes.items()})
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), model)
    written = checkpoint.export_safetensors(tmp_path, optimizer, max_shard_size=limit)
    assert [sorted(load_file(path)) for path in written] == [sorted(names) for names in files]
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 4 * sum(sizes.values())
        assert index["weight_map"] == {
            name: path.name for path, names in zip(written, files, strict=True) for name in names
        }
