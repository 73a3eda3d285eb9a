"""The commands of tests/lab; ``unit/stack`` and ``test_gpu_check.py`` test its fuzzers."""

import pytest

from lab import levels, nightly
from lab.__main__ import COMMANDS, main
from support.launch import ROOT


def test_lab_prints_help_for_every_command(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert f"usage: python tests/lab {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["program"])
    assert left.value.code == 2


def test_lab_nightly_names_only_existing_tests_and_commands():
    unchanged = levels.CHOOSE_THEMSELVES + levels.NAME_BACKENDS
    named = [*nightly.KILL_TESTS, *levels.TESTS, *levels.BRANCHES]
    assert all(list(ROOT.glob(f"tests/unit/*/test_{name}.py")) for name in unchanged)
    assert [name for name in named if not (ROOT / name).exists()] == []
    machines = nightly.machines(nightly.Options(seed=1))
    for commands in machines.values():
        for program, command, *_ in commands:
            assert program == "-m" or command in COMMANDS
