"""``mp-optim fit`` finds settings that fit the given memory, or names the missing bytes."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import transformers

from mp_optim.apps.cli.command import main
from mp_optim.apps.fit import command as fit
from mp_optim.apps.fit.activations import build_hf
from mp_optim.apps.fit.model_plan import specs_of
from support.llama import LLAMA

PUBLISHED = {
    **{
        "meta-llama/Llama-3.2-1B": 1_235_814_400,
        "meta-llama/Llama-2-7b-hf": 6_738_415_616,
        "meta-llama/Llama-3.1-8B": 8_030_261_248,
    },
    **{"meta-llama/Llama-3.1-70B": 70_553_706_496, "mistralai/Mistral-7B-v0.3": 7_248_023_552},
    **{
        "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
        "Qwen/Qwen3-0.6B": 596_049_920,
        "Qwen/Qwen3-4B": 4_022_468_096,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "Qwen/Qwen3-14B": 14_768_307_200,
        "Qwen/Qwen3-32B": 32_762_123_264,
        "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    },
    **{"Qwen/Qwen3-235B-A22B": 235_093_634_560, "allenai/OLMoE-1B-7B-0924": 6_919_161_856},
    **{
        "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
        "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    },
}
"""Number of parameters that the model card of each shipped config states."""


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    words = ["fit", "--json", "--seq", "128", *map(str, arguments)]
    status = main(words)
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [*PUBLISHED])
def test_shipped_model_configs_build_published_parameter_counts(name):
    model = build_hf(transformers.AutoConfig.for_model(**fit.shipped()[name]))
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]


def test_fit_changes_no_setting_when_the_model_fits_on_the_accelerator(config, capsys):
    status, said = answer(capsys, "--model", config, "--gpu", "4GB", "--ram", "8GB")
    assert status == 0 and said["fits"] and said["settings"] == {}
    assert not said["checkpointing"] and said["loss"] == "model"
    assert said["host"] < 4096  # The host holds step counters only.
    moments = said["moments"]
    assert said["peak"]["bytes"] == max(sum(of.values()) for of in moments.values())
    params = sum(
        spec.numel for spec in specs_of(build_hf(transformers.AutoConfig.for_model(**LLAMA)))
    )
    assert moments["step"]["parameters"] == moments["step"]["gradients"] == 2 * params
    assert moments["step"]["moments and averages"] == 8 * params


def test_fit_names_missing_bytes_when_a_model_does_not_fit(config, capsys):
    arguments = ("--model", config, "--gpu", "1GB", "--ram", "8GB")
    status, said = answer(capsys, *arguments)
    assert status == 3 and not said["fits"] and list(said["missing"]) == ["accelerator"]
    main(["fit", "--seq", "128", *map(str, arguments)])
    assert re.match(r"does not fit: .* lacks 0\.\d\d GiB of accelerator", capsys.readouterr().out)


def test_fit_counts_only_gradients_of_adapters_when_lora_is_set(config, capsys):
    arguments = ("--model", config, "--gpu", "4GB", "--ram", "8GB")
    _, said = answer(capsys, *arguments, "--lora", 4)
    _, whole = answer(capsys, *arguments)
    step = said["moments"]["step"]
    assert step["gradients"] < whole["moments"]["step"]["gradients"]
    # Gradients and moments of adapters are FP32.
    assert step["moments and averages"] == 2 * step["gradients"]
    assert "LoraConfig(r=4" in said["recipes"]["Python"]


def test_fit_accepts_a_model_built_by_a_python_function(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent("""
            import torch

            def build():
                with torch.device("meta"):
                    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
                return model, lambda model: model(
                    torch.zeros(8, 64, dtype=torch.bfloat16, device="cpu")
                ).sum()
        """)
    )
    status, said = answer(capsys, "--model", f"{path}:build", "--gpu", "2GB", "--ram", "8GB")
    assert status == 0 and said["recipes"] == {}
    assert main(["fit", "--model", f"{path}:other", "--gpu", "2GB", "--ram", "8GB"]) == 1
    assert "has no function other" in capsys.readouterr().err


def one_billion(tmp_path: Path) -> Path:
    """Write a file with a function that builds a model of 64 matrices of 4096 x 4096."""
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent("""
            import torch

            def build():
                with torch.device("meta"):
                    like = {"bias": False, "dtype": torch.bfloat16}
                    layers = [torch.nn.Linear(4096, 4096, **like) for _ in range(64)]
                model = torch.nn.Sequential(*layers)
                return model, lambda model: model(
                    torch.zeros(8, 4096, dtype=torch.bfloat16, device="cpu")
                ).sum()
        """)
    )
    return path


@pytest.mark.parametrize(
    ("gpu", "ram", "main_params", "kept"),
    [
        ("5.1GiB", "4.5GB", "exact", {}),
        ("5.1GiB", "3.5GB", "remainder8", {}),
        ("3.1GiB", "6.5GB", "exact", {"offload_mode": "overlap", "release_gradients": True}),
    ],
)
def test_fit_streams_8bit_state_when_host_memory_is_short(
    gpu, ram, main_params, kept, tmp_path, capsys
):
    path = one_billion(tmp_path)
    machine = ("--gpu", gpu, "--ram", ram, "--reserve", "0GB", "--host-reserve", "0GB")
    form = ("--main-params", main_params)
    status, said = answer(capsys, "--model", f"{path}:build", *machine, *form)
    assert status == 0 and said["certain"]
    stored = {"exact": "remainder16", "remainder8": "remainder8"}[main_params]
    streamed = {"state": "8bit", "offload": 1.0, "offload_place": "streamed"}
    assert said["settings"] == {**streamed, "main_params": stored, **kept}


@pytest.mark.parametrize(
    ("rates", "place"), [((25, 25, 72, 907, 3), "streamed"), ((1, 1, 500, 907, 3), "host")]
)
def test_fit_chooses_the_faster_offload_place_when_host_and_streamed_fit(
    rates, place, tmp_path, capsys
):
    machine = ("--gpu", "5.1GiB", "--ram", "64GB", "--reserve", "0GB", "--rates", *rates)
    _, said = answer(capsys, "--model", f"{one_billion(tmp_path)}:build", *machine)
    assert said["certain"] and said["settings"]["offload"] == 1.0
    assert said["settings"].get("offload_place", "host") == place


OK = ("--model", "meta-llama/Llama-3.2-1B", "--gpu", "1GB", "--ram", "1GB")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*OK, "--model", "Llama-3-8B"), "nearest are meta-llama/Llama-3.1-8B, .*config.json"),
        ((*OK, "--model", "nothing.py:build"), "no such Python file"),
        ((*OK, "--seq", "0"), "--seq 0: must be at least 1"),
        ((*OK, "--gpus", "0"), "--gpus 0: must be at least 1"),
        ((*OK, "--lora", "-1"), "--lora -1: must be a rank"),
        ((*OK, "--rates", *"00000"), "--rates .*: each must be more than 0 GB/s"),
    ],
)
def test_fit_names_the_argument_when_its_value_is_invalid(capsys, arguments, words):
    assert main(["fit", *arguments]) == 1
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize("command", [("plan",), ("fit", "--gpu", "1GB", "--ram", "1GB")])
def test_plan_and_fit_name_the_config_that_transformers_cannot_build(command, config, capsys):
    for wrong, reason in (({"hidden_size": 65}, "not a multiple of"), ({"hidden_size": -64}, "")):
        config.write_text(json.dumps({**LLAMA, **wrong}))
        assert main([*command, "--model", str(config)]) == 1
        said = capsys.readouterr().err
        assert f"--model {config}: transformers cannot build the model: " in said and reason in said
