"""Output and exit status of each ``mp-optim`` command."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

from mp_optim.apps.cli.command import COMMANDS, main, status_of
from support.launch import run_forked_program


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_cli_prints_help_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    overview = " ".join(help_of(capsys).split())
    for name, (_, what) in COMMANDS.items():
        assert f" {name} {what}" in overview
        assert f"usage: mp-optim {name}" in help_of(capsys, name)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mp-optim: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("command", [("list",), ("verify",), ("diff", "there")])
def test_inspect_refuses_a_path_without_a_complete_checkpoint(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    sentence = said(capsys, "inspect", *command, "nowhere")
    assert "no complete checkpoint under" in sentence


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "is damaged, or has objects other than"),
        (b"not a zip", "is damaged, or has objects other than"),
        (pickle.dumps(Path("/")), "is damaged, or has objects other than"),
        ([1, 2], "has another format"),
        ({"state": 3}, "instead of param_groups and state"),
    ],
)
def test_convert_refuses_a_source_file_without_optimizer_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object, words: str
) -> None:
    source, target = tmp_path / "file", tmp_path / "out"
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content is not None:
        torch.save(content, source)
    arguments = ("--source-format", "torch", "--source", source, "--target", target)
    sentence = said(capsys, "convert", *arguments)
    assert words in sentence and str(source) in sentence and not target.exists()


def test_cli_prints_the_cause_when_a_model_cannot_be_imported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command() -> int:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'Qwen3ForCausalLM'.") from error

    assert status_of(command) == 1
    text = capsys.readouterr().err
    assert "Qwen3ForCausalLM" in text and "torchvision::nms" in text and "None" not in text


def test_cli_exits_silently_when_its_output_pipe_is_closed() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os._exit(main(["conform", "--list"]))
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 141


def test_plan_prints_a_table_and_the_smallest_offload_fraction_that_fits(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ("--gpu-memory", "1", "--host-memory", "2")
    assert main(["plan", "--model", str(config), *memory]) == 0
    text = capsys.readouterr().out
    assert "accelerator, GiB" in text and "is the smallest that fits 1 GiB" in text
    assert "FP32: optimizer_offload_fraction=0 (offload=0) is" in text


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (["--state", "8bit"], "8-bit moments"),
        (["--state", "8bit", "--main-params", "remainder16"], "8-bit moments, remainders"),
        (["--main-params", "remainder8"], "FP32 moments, 8-bit remainders"),
        (["--state", "4bit", "--release-gradients"], "4-bit and 8-bit moments"),
    ],
)
def test_plan_accepts_storage_options_of_the_optimizer_classes(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], form: str
) -> None:
    model = ("plan", "--model", str(config), "--gpu-memory", "1")
    assert main([*model, *words]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == [form] * 5
    assert f"{form}: optimizer_offload_fraction=0 " in text


HELP = """
import sys
from mp_optim.apps.cli.command import COMMANDS, main
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit:
        pass
print("imported:", sorted({"matplotlib", "rich", "transformers", "yaml"} & set(sys.modules)))
"""


def test_cli_help_imports_no_optional_package() -> None:
    assert run_forked_program("-c", HELP).endswith("imported: []\n")


BARE = """
import sys
for name in ("matplotlib", "rich", "transformers", "yaml"):
    sys.modules[name] = None
from mp_optim.apps.cli.command import COMMANDS, main
sys.stderr = sys.stdout
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as left:
        print(name, left.code)
print("doctor", main(["doctor"]))
print("plan", main(["plan", "--model", sys.argv[1]]))
print("plan", main(["plan", "--model", sys.argv[1], "--optimizer", sys.argv[1]]))
"""


def test_cli_names_the_package_to_install_when_an_optional_package_is_missing(config: Path) -> None:
    # TRITON_INTERPRET=0 halves the time: the doctor does not interpret Triton's kernels.
    text = run_forked_program("-c", BARE, str(config), TRITON_INTERPRET="0")
    for name in COMMANDS:
        assert f"\n{name} 0\n" in text and f"usage: mp-optim {name}" in text
    assert "fused_backend='auto' takes" in text
    for module, package in (("transformers", "transformers"), ("yaml", "pyyaml")):
        assert f"needs {module}: pip install {package}\nplan 1\n" in text
