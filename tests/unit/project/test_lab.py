"""The lab's own commands; what its machines find is tested where they are: in ``unit/stack``,
``test_mutation.py`` and ``test_gpu_check.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import levels, nightly
from lab.__main__ import COMMANDS, main
from support.launch import ROOT


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert f"usage: python tests/lab {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["program"])
    assert left.value.code == 2


@pytest.mark.slow
def test_a_night_runs_its_machines_with_one_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--programs", "2", "--layouts", "1", "--seed", "7", "--output", str(tmp_path))
    assert main(["nightly", "--only", "layouts", "programs", *size]) == 0
    said = capsys.readouterr().out
    assert [line.split(",")[0] for line in said.splitlines()] == ["programs: good", "layouts: good"]
    assert "2 programs, " in (tmp_path / "programs.log").read_text()
    assert "1 layouts from 7: 0 failed" in (tmp_path / "layouts.log").read_text()


def test_a_machine_that_fails_ends_alone_and_fails_the_night(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        "first": [["-c", "print('one'); raise SystemExit(3)"], ["-c", "print('two')"]],
        "second": [["-c", "print('three')"]],
    }
    monkeypatch.setattr(nightly, "machines", lambda options: commands)
    assert nightly.main(nightly.Options(output=tmp_path)) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said] == ["first: FAILED", "second: good"]
    assert (tmp_path / "first.log").read_text() == "one\n"
    assert nightly.main(nightly.Options(output=tmp_path, only=("second",))) == 0
    assert nightly.main(nightly.Options(output=tmp_path, only=("third",))) == 2


def test_what_a_night_and_the_levels_run_exists() -> None:
    unchanged = levels.CHOOSE_THEMSELVES + levels.NAME_BACKENDS
    named = [*nightly.KILL_TESTS, *levels.TESTS, *levels.BRANCHES]
    assert all(list(ROOT.glob(f"tests/unit/*/test_{name}.py")) for name in unchanged)
    assert [name for name in named if not (ROOT / name).exists()] == []
    machines = nightly.machines(nightly.Options(seed=1))
    for commands in machines.values():
        for program, command, *_ in commands:
            assert program == "-m" or command in COMMANDS
