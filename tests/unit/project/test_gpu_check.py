"""tools/gpu_check.py on a CPU: single parts, resumed runs and failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from end_to_end.runner import Results, run
from lab.gpu import agreement, opponents, speed
from lab.gpu.parts import PARTS, is_done, rows, write
from mp_optim.kernels.reference import ReferenceBackend
from support.launch import TOOLS, run_forked_program
from support.standins import amp_c

SMALL = ("--device", "cpu", "--params", "1e5", "--hybrid-params", "1e5", "--rounds", "3")
MACHINE = {"device": "a GPU", "torch": "2", "date": "today"}
SIZES = {"params": 100, "hybrid_params": 100, "rounds": 1}


def check(*arguments: str) -> str:
    return run_forked_program(str(TOOLS / "gpu_check.py"), *SMALL, *arguments)


def test_gpu_check_writes_a_part_at_once_and_lists_it_as_done(tmp_path: Path) -> None:
    printed = check("--output", str(tmp_path), "--only", "rates")
    assert "rates: " in printed and "failed" not in printed
    for name in ("rates",):
        outcome = json.loads((tmp_path / "gpu" / f"{name}.json").read_text())
        assert outcome["columns"]["title"] and outcome["cause"] == ""
        assert outcome["facts"]["torch"] and outcome["took"] > 0
    recorded = json.loads((tmp_path / "gpu.json").read_text())["parts"]["rates"]
    assert recorded["section"]["rows"] and recorded["machine"] == outcome["facts"]
    assert "## Memory of the device" in (tmp_path / "gpu.md").read_text()
    listed = check("--output", str(tmp_path), "--list").split()
    assert listed.count("there") == 1 and all(name in listed for name in PARTS)


def test_gpu_check_fails_the_backend_part_when_auto_is_not_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other parts would otherwise measure a slower backend."""
    assert list(PARTS)[:2] == ["door", "backend"]
    slow = ReferenceBackend(), "not triton: fails a first step"
    monkeypatch.setattr(agreement, "choose_backend", lambda name, device: slow)
    with pytest.raises(RuntimeError, match=r"auto chooses reference; .*fails a first"):
        agreement.chosen(torch.device("cuda"))


def test_gpu_check_opponents_train_to_the_parameters_of_our_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The opponents are Megatron-core and the unfused sequence with each Adam, on a small model."""
    # Megatron steps with torch's Adam only if it is imported before the stand-ins.
    pytest.importorskip("megatron.core.optimizer")

    def fused_adam(params: list[Tensor], adam_w_mode: bool, **settings: Any) -> Any:
        return torch.optim.AdamW(params, **settings)

    for name in ("apex.optimizers", "transformer_engine.pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(FusedAdam=fused_adam))
    monkeypatch.setitem(sys.modules, "amp_C", amp_c.module())
    trained: dict[str, list[Tensor]] = {}

    def keep(opponent: opponents.Opponent) -> opponents.Opponent:
        def build(params: list[Tensor], grads: list[Tensor]) -> Any:
            trained[opponent.name] = params
            return opponent.build(params, grads)

        return opponent._replace(build=build)

    cores = map(opponents.megatron_core, (False, True))
    rate = speed.Rate(torch.device("cpu"))
    rate.limit = 1e10
    section = speed.steps(rate, 1000, 1, map(keep, [*opponents.opponents(), *cores]))
    assert section.missing == {} and len(section.rows) == 4 * len(trained) == 20
    ours = [name for name in section.rows if name.startswith("mp_optim")]
    assert all(section.rows[name]["times_ours"] == 1.0 for name in ours) and len(ours) == 10
    first, *others = trained.values()
    assert (first[0] < 0.02).all()
    for params in others:
        torch.testing.assert_close(params, first, rtol=2**-7, atol=0.0)


def test_gpu_check_full_step_measures_fp32_main_grad() -> None:
    rate = speed.Rate(torch.device("cpu"))
    step = speed.full_step(rate, "auto", [1000], wide=True)
    assert step()[1] == pytest.approx(1e-3 * 1000**0.5)


def test_gpu_check_records_a_failed_part_and_repeats_only_that_part(tmp_path: Path) -> None:
    results, (first, second, *_) = Results(tmp_path, "gpu"), rows(SIZES)
    wrong = run(results, "", second, "nowhere")
    assert wrong["columns"] is None and "\n" not in wrong["cause"]
    section = {"title": "B", "rows": {}, "missing": {}}
    arguments = dict(first.arguments)
    good = {"arguments": arguments, "columns": section, "cause": "", "took": 1, "facts": MACHINE}
    results.file("", first).write_text(json.dumps(good))
    assert is_done(results, first, MACHINE | {"date": "tomorrow"})
    assert not is_done(results, first, MACHINE | {"torch": "3"})
    assert not is_done(results, second, MACHINE)
    write(results, [first, second])
    assert f"Failed: {wrong['cause']}" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gpu_check_runs_every_part_on_a_simulated_accelerator(tmp_path: Path) -> None:
    sizes = ("--params", "1e2", "--hybrid-params", "1e2", "--rounds", "1")
    program = (str(TOOLS / "gpu_check.py"), "--device", "simulated", *sizes)
    run_forked_program(*program, "--output", str(tmp_path), timeout=900)
    outcomes = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: one["cause"] for name, one in outcomes.items() if one["cause"]} == {}
    assert set(outcomes) == set(PARTS)
    for name in ("door", "bits", "ranks"):
        found = outcomes[name]["section"]["rows"]
        assert found and all({*row.values()} == {1.0} for row in found.values())
