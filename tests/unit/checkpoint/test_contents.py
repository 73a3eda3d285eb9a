"""Export to safetensors, and the ``inspect`` command on checkpoints."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mp_optim
from mp_optim import checkpoint
from mp_optim.apps.cli.command import main
from mp_optim.apps.cli.inspect import compare
from mp_optim.checkpoint.reading import open_checkpoint
from support.models import build, same_bits, tokens_of, train


@pytest.mark.parametrize(
    ("form", "limit", "count"),
    [("bf16", 10**9, 1), ("bf16-remainder", 1500, 3), ("fp16", 1, 7), ("fp32", 10**9, 1)],
)
def test_export_safetensors_writes_main_params_into_files_below_the_limit(
    tmp_path, form, limit, count
):
    model, optimizer = build(form, 0.5)
    train(model, optimizer, 2)
    (tmp_path / "config.json").write_text("{}")
    # An earlier export, which the next export replaces.
    checkpoint.export_safetensors(tmp_path, optimizer, max_shard_size=1)
    files = checkpoint.export_safetensors(tmp_path, optimizer, max_shard_size=limit)
    found = {name: value for path in files for name, value in load_file(path).items()}
    expected = {name: main.detach() for name, main in optimizer.named_main_params()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(found[name], value) and value.dtype == torch.float32
    index = tmp_path / "model.safetensors.index.json"
    assert len(files) == count and index.exists() == (count > 1)
    if count > 1:
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
        for name, file in content["weight_map"].items():
            assert name in load_file(tmp_path / file)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        assert [path.name for path in files] == names
        for tensors in map(load_file, files):
            assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= limit
    written = {"config.json", *(path.name for path in files)} | (
        {index.name} if count > 1 else set()
    )
    assert {path.name for path in tmp_path.iterdir()} == written


def unnamed(seed=0, **settings):
    model, _ = build("bf16", seed=seed)
    optimizer = mp_optim.AdamW(list(model.parameters()), lr=1e-2, **settings)
    model(tokens_of(0)).backward()
    optimizer.step()
    return model, optimizer


WRAPS = {
    "module": lambda model: model,
    "chunks": lambda model: [model],
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("averaged", [False, True])
def test_export_safetensors_takes_names_of_the_model_for_unnamed_parameters(
    tmp_path, wrap, averaged
):
    model, optimizer = unnamed(ema_decay=0.5) if averaged else unnamed()
    given = {"model": WRAPS[wrap](model), "averaged": averaged}
    (path,) = checkpoint.export_safetensors(tmp_path, optimizer, **given)
    found = load_file(path)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters() if not averaged else ():
        assert torch.equal(found[name].bfloat16(), param.bfloat16())


def test_export_safetensors_refuses_unnamed_parameters_without_their_model(tmp_path):
    _, optimizer = unnamed()
    with pytest.raises(ValueError, match=r"group0\.param0: .* no names.*model="):
        checkpoint.export_safetensors(tmp_path / "out", optimizer)
    other, _ = unnamed(seed=1)
    with pytest.raises(ValueError, match=r"group0\.param0 of shape .* not a parameter of model="):
        checkpoint.export_safetensors(tmp_path / "out", optimizer, model=other)
    assert not (tmp_path / "out").exists()
    named = build("bf16")
    checkpoint.export_safetensors(tmp_path / "out", named[1], model=named[0])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == dict(named[0].named_parameters()).keys()


PAIRS = {
    "same": (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])),
    "near": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 - 2.0**-22])),
    "zero": (torch.zeros(1), -torch.zeros(1)),
    "short": (torch.ones(2).bfloat16(), torch.tensor([1.0, -1.0]).bfloat16()),
    "whole": (torch.tensor([1, 2]), torch.tensor([1, 5])),
    "nan": (torch.tensor([1.0]), torch.tensor([math.nan])),
    "shape": (torch.ones(2), torch.ones(3)),
    "kind": (torch.ones(2), torch.ones(2).half()),
    "mine": (torch.ones(1), None),
    "yours": (None, torch.ones(1)),
}
"""A tensor of each of two compared checkpoints; None is left out."""


def saved(path, index):
    model = nn.Module()
    for name, pair in PAIRS.items():
        if pair[index] is not None:
            model.register_buffer(name, pair[index])
    checkpoint.save(path, model, None)
    return open_checkpoint(path)


def test_compare_counts_different_elements_and_ulps_of_each_tensor(tmp_path):
    rows = compare(saved(tmp_path / "a", 0), saved(tmp_path / "b", 1))
    found = {row.name.removeprefix("model."): row for row in rows}
    others = {"same": "equal", "mine": "only in a", "yours": "only in b"}
    others |= {"shape": "shape", "kind": "dtype"}
    assert {name: row.what for name, row in found.items()} == dict.fromkeys(
        PAIRS, "values"
    ) | others
    numbers = {name: (row.differing, row.largest, row.ulps) for name, row in found.items()}
    assert {numbers.pop(name) for name in others} == {(0, 0.0, None)}
    assert math.isnan(numbers.pop("nan")[1])
    assert numbers == {
        "near": (1, 2.0**-22, 2),
        "zero": (1, 0.0, 0),
        "short": (1, 2.0, 2 * 0x3F80),
        "whole": (1, 3.0, None),
    }


def test_export_safetensors_names_the_package_to_install_when_safetensors_is_missing(
    tmp_path, monkeypatch
):
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install mp_optim\[hf\]"):
        checkpoint.export_safetensors(tmp_path / "out", build("bf16")[1])
    assert not (tmp_path / "out").exists()


def test_inspect_lists_compares_and_verifies_checkpoints(tmp_path, capsys):
    def run(*command):
        status = main(["inspect", *map(str, command)])
        said = capsys.readouterr()
        return status, said.out + said.err

    model, optimizer = build("bf16-8bit", 0.5)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path / "a", model, optimizer)
    train(model, optimizer, 1)
    version = checkpoint.save(tmp_path / "b", model, optimizer)
    status, text = run("list", tmp_path / "a", "--match", "embed")
    assert status == 0 and "model.embed" in text and "(11, 8)" in text and "exp_avg_scale" in text
    assert "model.dense" not in text and "version-1" in text
    assert run("diff", tmp_path / "a", tmp_path / "a")[0] == 0
    status, text = run("diff", tmp_path / "a", version)
    assert status == 1 and "model.embed" in text and "different" in text
    assert run("verify", version)[0] == 0
    with (version / "common.json").open("r+b") as file:
        file.write(b"?")
    status, text = run("verify", version)
    assert status == 1 and "common.json" in text
    status, text = run("list", tmp_path)
    assert status == 1 and "no complete checkpoint" in text
