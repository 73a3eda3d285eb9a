"""The boxes of a tensor in a checkpoint must cover each element exactly once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mp_optim import checkpoint
from mp_optim.checkpoint.reading import open_checkpoint
from support.forged import replaced
from support.models import build
from support.prints import differing, print_of

SHAPE = (4, 6)
Boxes = list[tuple[tuple[int, int], tuple[int, int]]]

WHOLE: dict[str, Boxes] = {
    "halves": [((0, 0), (2, 6)), ((2, 0), (2, 6))],
    "a pinwheel": [
        ((0, 0), (1, 4)),
        ((0, 4), (3, 2)),
        ((3, 2), (1, 4)),
        ((1, 0), (3, 2)),
        ((1, 2), (2, 2)),
    ],
}

BROKEN: dict[str, Boxes] = {
    "a hole": [((0, 0), (2, 6))],
    "one half twice": [((0, 0), (2, 6)), ((0, 0), (2, 6))],
    "halves that overlap": [((0, 0), (2, 6)), ((1, 0), (2, 6))],
    "one inside another": [((0, 0), (3, 6)), ((1, 0), (1, 6))],
    "a pinwheel whose middle lies elsewhere": [*WHOLE["a pinwheel"][:-1], ((1, 1), (2, 2))],
}


class Holder(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(SHAPE, value))


def cut(version: Path, name: str, boxes: Boxes) -> None:
    index = json.loads((version / "index.json").read_text())
    dtype, shape, file, start = index["entries"][name]
    plain = [[offsets, sizes, file, start] for offsets, sizes in boxes]
    index["entries"][name] = [dtype, shape, plain]
    replaced(version, "index.json", json.dumps(index).encode())


@pytest.mark.parametrize("boxes", WHOLE.values(), ids=WHOLE.keys())
def test_load_reads_a_tensor_when_saved_boxes_cover_each_element_once(tmp_path, boxes):
    version = checkpoint.save(tmp_path, Holder(1.0), None)
    cut(version, "model.weight", boxes)
    target = Holder(2.0)
    checkpoint.load(version, target, None, verify=True)
    assert bool((target.weight == 1.0).all())


@pytest.mark.parametrize("boxes", BROKEN.values(), ids=BROKEN.keys())
def test_load_refuses_a_tensor_when_saved_boxes_do_not_cover_each_element_once(tmp_path, boxes):
    version = checkpoint.save(tmp_path, Holder(1.0), None)
    cut(version, "model.weight", boxes)
    target = Holder(2.0)
    for read in (
        lambda: checkpoint.load(version, target, None, verify=True),
        lambda: open_checkpoint(version).read("model.weight"),
    ):
        with pytest.raises(ValueError, match=r"model\.weight: .*each element .*once"):
            read()
    assert bool((target.weight == 2.0).all())


@pytest.mark.parametrize(
    ("dtype", "said"),
    [("Tensor", "the dtype 'Tensor' is not"), ("float33", "float33"), (1, "index.json")],
)
def test_load_refuses_unknown_dtypes_by_name(tmp_path, dtype, said):
    version = checkpoint.save(tmp_path, Holder(1.0), None)
    index = json.loads((version / "index.json").read_text())
    index["entries"]["model.weight"][0] = dtype
    replaced(version, "index.json", json.dumps(index).encode())
    target = Holder(2.0)
    with pytest.raises(ValueError, match=said):
        checkpoint.load(version, target, None)
    assert bool((target.weight == 2.0).all())


@pytest.mark.parametrize("form", ["bf16", "bf16-8bit"])
def test_load_changes_nothing_when_saved_boxes_of_a_state_tensor_overlap(tmp_path, form):
    version = checkpoint.save(tmp_path, *build(form, seed=1))
    content: Any = (version / "index.json").read_bytes()
    entries = json.loads(content)["entries"]
    model, optimizer = build(form, seed=7)
    before = print_of(model, optimizer)
    kinds: dict[str, str] = {}
    for name, (_, shape, *_) in entries.items():
        if shape and shape[0] % 2 == 0:
            kinds.setdefault(name.rpartition(".")[0][:24], name)
    assert len(kinds) > 3
    for name in kinds.values():
        _, (first, *others), *_ = entries[name]
        half = ([0] * (1 + len(others)), [first // 2, *others])
        cut(version, name, [half, half])
        with pytest.raises(ValueError, match=r"each element .*once"):
            checkpoint.load(version, model, optimizer)
        assert differing(before, print_of(model, optimizer)) == []
        replaced(version, "index.json", content)
