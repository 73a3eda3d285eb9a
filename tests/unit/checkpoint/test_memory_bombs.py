"""The memory that a load takes is bounded by the size of the files."""

import io
import json
import os
import pickle
import resource
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mp_optim import checkpoint
from mp_optim.apps import convert as foreign
from mp_optim.apps.convert import command as convert
from mp_optim.apps.convert.torch_files import load_plain_file
from mp_optim.checkpoint.common import as_json, from_json
from support.forged import archive, replaced
from support.models import build
from support.prints import differing, print_of

LARGE = 1 << 30
MOST_MIB = 64
SIZE = b"\x8a\x05" + LARGE.to_bytes(5, "little")
"""The pickle opcode that pushes the number LARGE."""


def called(module: str, name: str, arguments: bytes = SIZE + b"\x85") -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"q\x00" + arguments + b"R."


def by_another(name: str) -> bytes:
    made = f"cbuiltins\n{name}\n".encode() * 2 + SIZE + b"\x85}"
    return called("torch._tensor", "_rebuild_from_type_v2", b"(" + made + b"t")


def legacy(pickled: bytes) -> bytes:
    parts = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {})]
    return b"".join(parts) + pickled + pickle.dumps([], 2)


PICKLES: dict[str, Callable[[], bytes]] = {
    "bytearray of a size": lambda: archive(called("__builtin__", "bytearray")),
    "bytearray, remembered": lambda: archive(
        b"\x80\x02cbuiltins\nbytearray\nq\x000" + SIZE + b"q\x010h\x00h\x01\x85R."
    ),
    "bytearray, by NEWOBJ": lambda: archive(
        b"\x80\x02cbuiltins\nbytearray\n" + SIZE + b"\x85\x81."
    ),
    "bytearray, by another": lambda: archive(by_another("bytearray")),
    "a tensor of a size": lambda: archive(called("torch", "FloatTensor")),
    "legacy": lambda: legacy(called("__builtin__", "bytearray")),
    "memo": lambda: archive(b"\x80\x02Nr" + struct.pack("<I", (1 << 26) - 1) + b"."),
    "memo, in words": lambda: archive(b"Np67108863\n."),
    "bytes of a size": lambda: archive(b"\x80\x05\x96" + struct.pack("<Q", LARGE) + b"."),
    "a string of a size": lambda: archive(b"\x80\x05\x8d" + struct.pack("<Q", LARGE) + b"."),
    "a frame of a size": lambda: archive(b"\x80\x05\x95" + struct.pack("<Q", 1 << 40) + b"N."),
    "deflated": lambda: archive(b"\0" * (LARGE >> 3), zipfile.ZIP_DEFLATED),
    "deflated elements": lambda: archive(
        pickle.dumps({}, 2), zipfile.ZIP_DEFLATED, x=b"\0" * (LARGE >> 3)
    ),
}


def refused(
    path: Path,
    message: str,
    load: Callable[[Path, Any, Any], object] = checkpoint.load,
    most_mib: int = MOST_MIB,
) -> None:
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        model, optimizer = build("bf16")
        before, taken = print_of(model, optimizer), peak()
        said = "nothing was raised"
        try:
            load(path, model, optimizer)
        except ValueError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        changed = differing(before, print_of(model, optimizer))
        os.write(end, json.dumps([said, peak() - taken, changed]).encode())
        os._exit(0)
    os.close(end)
    with os.fdopen(begin, "rb") as told:
        said, taken, changed = json.loads(told.read() or b'["it was killed", 0, []]')
    os.waitpid(child, 0)
    assert message in said
    assert taken < most_mib << 10, f"{taken >> 10} MiB"
    assert changed == []


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path / "ck", *build("bf16"))


@pytest.mark.parametrize("shape", [[LARGE], [0, 1 << 70], [-1], ["4"], LARGE])
def test_load_refuses_plain_data_tensors_when_shape_and_bytes_do_not_match(version, shape):
    common = json.loads((version / "common.json").read_text())
    common["extra"] = {"$tensor": ["float32", shape, "AAAA"]}
    replaced(version, "common.json", json.dumps(common).encode())
    refused(version, "common.json is damaged or has objects other than plain data")


FOREIGN: dict[str, Callable[[Path, Any, Any], object]] = {
    "mp_optim": lambda path, *_: foreign.from_file(path),
    "deepspeed": lambda path, *_: foreign.from_deepspeed(universal(path)),
    "the step": lambda path, *_: foreign.from_deepspeed(universal(path, "step")),
    "convert": lambda path, *_: command(path, "torch"),
}


def universal(path: Path, bomb: str = "exp_avg") -> Path:
    folder = path.parent / "zero" / "w"
    folder.mkdir(parents=True)
    for name in ("fp32", "exp_avg", "exp_avg_sq", "step"):
        torch.save(torch.zeros(()), folder / f"{name}.pt")
    path.rename(folder / f"{bomb}.pt")
    return path.parent


def command(path: Path, source_format: Any) -> None:
    convert.read(convert.Options(path, path.parent / "out.pt", source_format))


@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        *((kind, "mp_optim") for kind in PICKLES),
        *(("legacy", reader) for reader in list(FOREIGN)[1:]),
    ],
)
def test_from_file_refuses_a_small_file_that_asks_for_a_gibibyte_of_memory(tmp_path, kind, reader):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (tmp_path / "state.pt").write_bytes(PICKLES[kind]())
    message = "is damaged, or has objects other than plain data and tensors"
    refused(tmp_path / "state.pt", message, FOREIGN[reader])


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_convert_refuses_expanded_tensors_before_it_allocates_copies(tmp_path, key):
    tensors = {"exp_avg": torch.zeros(4), "step": torch.zeros(())}
    tensors[key] = torch.zeros((), dtype=torch.float64).expand(LARGE)
    group = {"params": [0], "param_names": ["w"]}
    torch.save({"param_groups": [group], "state": {0: tensors}}, tmp_path / "state.pt")
    refused(tmp_path / "state.pt", "1073741824", FOREIGN["convert"])


def test_load_plain_file_takes_at_most_160_mib_for_a_tensor_of_64_mib(tmp_path):
    state = {"exp_avg": torch.ones(16 << 20)}  # 64 MiB
    torch.save(state, tmp_path / "state.pt")
    state.clear()

    def load(path: Path, *_: Any) -> None:
        raise ValueError(f"read {int(load_plain_file(path)['exp_avg'].sum())}")

    refused(tmp_path / "state.pt", f"read {16 << 20}", load, most_mib=160)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_load_refuses_index_entries_with_a_huge_shape_and_no_stored_boxes(version, dtype):
    index = json.loads((version / "index.json").read_text())
    index["entries"]["optimizer.state.more.dense"] = [dtype, [LARGE], []]
    replaced(version, "index.json", json.dumps(index).encode())
    refused(version, "must have each element of the shape (1073741824,) once")


def test_load_plain_file_returns_the_objects_that_torch_load_returns(tmp_path):
    data: dict[Any, Any] = {
        "numbers": [1, -(1 << 80), 2.5, True, None, 1 + 2j],
        "texts": ("a", "\N{SNOWMAN}", b"\0\xff", bytearray(b"xy"), bytearray()),
        "sets": {1, 2},
        "tensors": [torch.arange(6).view(2, 3).t(), torch.tensor(1.5).bfloat16()],
        "form": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        7: {"again": {}},
    }
    data["same"] = data["tensors"][0]
    for zipped in (True, False):
        content = io.BytesIO()
        torch.save(data, content, _use_new_zipfile_serialization=zipped)
        (tmp_path / "plain.pt").write_bytes(content.getvalue())
        found = load_plain_file(tmp_path / "plain.pt")
        content.seek(0)
        assert repr(found) == repr(torch.load(content, weights_only=True))
        assert found["same"].data_ptr() == found["tensors"][0].data_ptr()
    restored = from_json(as_json(data))
    data["parameter"] = data["parameter"].detach()
    assert repr(restored) == repr(data)


def test_load_refuses_links_that_lead_out_of_the_checkpoint_folder(version, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    for path in (version / "manifest.json", version.parent / "latest"):
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(secret)
        with pytest.raises(ValueError, match="a link to a folder outside") as caught:
            checkpoint.load(version.parent, *build("bf16"))
        assert "hidden" not in str(caught.value)
        path.unlink()
        path.write_bytes(content)
    checkpoint.load(version.parent, *build("bf16"))
