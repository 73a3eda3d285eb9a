"""A checkpoint from an untrusted source runs no code and reads no file outside its folder."""

import codecs
import functools
import importlib
import io
import json
import os
import pickle
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim import checkpoint
from mp_optim.apps import convert as foreign
from mp_optim.apps.cli import inspect
from mp_optim.apps.convert import command as convert
from mp_optim.apps.convert.torch_files import InertUnpickler, Record
from mp_optim.checkpoint.reading import open_checkpoint
from support.forged import archive, replaced
from support.models import build


class Calls:
    """An object that pickles as a call of a function."""

    def __init__(self, function, *arguments, state=None):
        self.answer = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.answer

    def __call__(self):
        """Make the object callable, which pickle requires of a function."""


@functools.lru_cache
def target():
    return build("bf16-8bit", 0.5)


@functools.lru_cache
def written(folder):
    return checkpoint.save(folder, *target())


def bombs(canary):
    touch, source = f"touch {canary}", f"open({str(canary)!r}, 'w')"
    calls = {
        "system": Calls(os.system, touch),
        "popen": Calls(subprocess.Popen, ["touch", str(canary)]),
        "eval": Calls(eval, source),
        "exec": Calls(exec, source),
        "partial": Calls(functools.partial, Calls(eval, source)),
        "open": Calls(open, str(canary), "w"),
        "getattr": Calls(Calls(getattr, Calls(importlib.import_module, "os"), "system"), touch),
        "codecs": Calls(codecs.encode, Calls(eval, source), "utf-8"),
        "runpy": Calls(runpy.run_path, str(canary.with_suffix(".py"))),
        "torch.load": Calls(
            torch.load,
            str(canary.with_suffix(".pt")),
            "cpu",
            Calls(importlib.import_module, "pickle"),
        ),
        "size": Calls(torch.Size, Calls(map, Calls(eval, f"lambda _: {source}"), [1])),
        "state": Calls(torch.Size, [], state={"x": Calls(os.system, touch)}),
    }
    found = {
        f"{name}, protocol {protocol}": pickle.dumps(call, protocol)
        for name, call in calls.items()
        for protocol in (0, 2, 5)
    }
    for opcode in (
        f"(S'{touch}'\nios\nsystem\n.",
        f"cos\nsystem\n(S'{touch}'\ntR.",
        f"(cos\nsystem\nS'{touch}'\no.",
    ):
        found[opcode[:12]] = opcode.encode()
    return found


def entry_points(root):
    return {
        "load": lambda: checkpoint.load(root, *target()),
        "model": lambda: checkpoint.load(root, target()[0], None),
        "verified": lambda: checkpoint.load(root, *target(), verify=True),
        "verify": lambda: checkpoint.verify(root),
        "versions": lambda: checkpoint.versions(root),
        "contents": lambda: open_checkpoint(root),
        "foreign": lambda: foreign.from_checkpoint(root),
        "list": lambda: inspect.main(["list", str(root)]),
        "convert": lambda: convert.main(
            ["--source", str(root), "--target", str(root / "t"), "--source-format", "checkpoint"]
        ),
    }


READERS = {"load", "model", "verified", "contents", "foreign", "list", "convert"}
"""The functions of ``entry_points`` that read where tensors are stored."""


@pytest.fixture
def version(tmp_path, tmp_path_factory):
    version = written(tmp_path_factory.getbasetemp() / "written")
    shutil.copytree(version.parent, tmp_path / "new")
    return tmp_path / "new" / version.name


def test_load_runs_no_code_pickled_in_plain_data(tmp_path, version):
    canary = tmp_path / "ran"
    canary.with_suffix(".py").write_text(f"open({str(canary)!r}, 'w')")
    torch.save(Calls(os.system, f"touch {canary}"), canary.with_suffix(".pt"))
    (tmp_path / "state").mkdir()
    for number, (name, bomb) in enumerate(bombs(canary).items()):
        for way, content in enumerate((bomb, archive(bomb))):
            replaced(version, "common.json", content)
            with pytest.raises(ValueError, match=r"common\.json is damaged"):
                checkpoint.load(version, *target())
            file = tmp_path / "state" / f"{number}-{way}.pt"
            file.write_bytes(content)
            with pytest.raises(ValueError, match="is damaged, or has objects other"):
                foreign.from_file(file)
            assert not canary.exists(), name
    for name, read in entry_points(version.parent).items():
        if name in ("load", "model", "verified"):
            with pytest.raises(ValueError, match=r"common\.json is damaged"):
                read()
        # Both refuse compact state before they read a pickle.
        elif name not in ("foreign", "convert"):
            read()
        assert not canary.exists(), name
    pickle.loads(bombs(canary)["eval, protocol 2"])
    assert canary.exists()  # Plain pickle runs the same bytes.


def test_load_never_reads_pickles_that_are_not_plain_data(tmp_path, version):
    canary = tmp_path / "ran"
    bomb = bombs(canary)["system, protocol 2"]
    for name in (".metadata", "extra.pkl"):
        replaced(version, name, bomb)
    for name, read in entry_points(version.parent).items():
        # Both refuse compact state before they read a pickle.
        if name not in ("foreign", "convert"):
            read()
    assert not canary.exists()


NAMES = {
    name: sorted(vars(module)) or ["x"]
    for name, module in sorted(sys.modules.items())
    if module is not None and name.isascii()
}
"""Names in each module at import time; modules gain names while hypothesis draws examples."""


@given(
    st.sampled_from(list(NAMES)).flatmap(
        lambda module: st.tuples(st.just(module), st.sampled_from(NAMES[module]))
    ),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_unpickler_calls_and_changes_no_global_when_a_pickle_names_one(found, changes):
    module, name = found
    own = vars(sys.modules[module]).get(name)
    before = dict(vars(own)) if isinstance(own, type) else None
    # Call the global, or set one of its attributes.
    call = b"(I1\ntR" if not changes else b"N}S'x'\nI1\ns\x86b"
    pickled = b"\x80\x02c" + f"{module}\n{name}\n".encode() + call + b"."
    try:
        made = InertUnpickler(io.BytesIO(pickled)).load()
    except (pickle.UnpicklingError, TypeError, AttributeError):
        made = None
    kind = made if isinstance(made, type) else type(made)
    assert made is None or (issubclass(kind, Record) and kind is not own)
    assert before is None or dict(vars(own)) == before


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"..",
        b".",
        b"../other/version-1",
        b"/etc",
        b"version-1/../version-1",
        b"\x00",
        b"version-1\x00",
        b"\xff\xfe",
        b"a" * 300,
        b"version-1\nversion-1",
        b"out",
        b"..\\other",
        b"C:version-1",
    ],
)
def test_load_refuses_a_latest_file_that_names_no_version(tmp_path, version, text):
    root = version.parent
    shutil.copytree(root, tmp_path / "other")
    (root / "out").symlink_to(tmp_path / "other" / "version-1")
    (root / "latest").write_bytes(text)
    for name, read in entry_points(root).items():
        if name != "versions":
            with pytest.raises(
                ValueError, match=r"latest is damaged.*complete versions \['version-1'\]"
            ):
                read()


def moved(version, to):
    """Let the index of a checkpoint name another file for its tensors."""
    index = json.loads((version / "index.json").read_text())
    index["files"] = [to]
    replaced(version, "index.json", json.dumps(index).encode())


@pytest.mark.parametrize("to", ["../outside", "/outside", "sub/../../outside", "link", ".", ""])
def test_load_refuses_tensor_files_outside_the_folder(version, to):
    (version / "sub").mkdir()
    shutil.copy(version / "__0_0.distcp", version.parent / "outside")
    (version / "link").symlink_to(version.parent / "outside")
    if to == "/outside":
        to = str(version.parent / "outside")
    manifest = json.loads((version / "manifest.json").read_text())
    for listed in (False, True):
        moved(version, to)
        if listed:
            manifest = json.loads((version / "manifest.json").read_text())
            manifest["files"][to] = manifest["files"]["__0_0.distcp"]
            (version / "manifest.json").write_text(json.dumps(manifest))
        for name, read in entry_points(version.parent).items():
            if name in READERS:
                with pytest.raises(
                    ValueError, match=r"not in the manifest|which is a path|a link to|is missing or"
                ):
                    read()


def test_load_follows_a_link_within_the_folder(version):
    (version / "__0_0.distcp").rename(version / "data")
    (version / "__0_0.distcp").symlink_to("data")
    checkpoint.load(version.parent, *target(), verify=True)
