"""State of a parameter that was trained and is frozen now."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mp_optim
from mp_optim import checkpoint
from support.models import same_bits

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Run:
    def __init__(self, tmp_path: Path, dtype: str, rule: str = "AdamW", **settings: Any) -> None:
        if "optimizer_state_path" in settings:
            settings["optimizer_state_path"] = str(tmp_path)
        self.rule, self.settings = rule, settings
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        for name in ("a", "b"):
            values = torch.randn(6, 4, generator=generator).to(DTYPES[dtype])
            self.model.register_parameter(name, nn.Parameter(values))
        self.count, self.optimizer = 0, self.built()

    def built(self) -> Any:
        named = list(self.model.named_parameters())
        return getattr(mp_optim, self.rule)(named, lr=0.01, **self.settings)

    def step(self) -> None:
        for param in self.model.parameters():
            generator = torch.Generator().manual_seed(self.count)
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = grad if param.requires_grad else None
        self.optimizer.step()
        self.count += 1

    def freeze(self, *names: str) -> None:
        for name, param in self.model.named_parameters():
            param.requires_grad_(name not in names)

    def resume(self, via: str, path: Path) -> None:
        if via == "checkpoint":
            checkpoint.save(path, self.model, self.optimizer)
            self.optimizer = self.built()
            checkpoint.load(path, self.model, self.optimizer)
        else:
            saved = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer = self.built()
            self.optimizer.load_state_dict(saved)

    def everything(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        assert [*state] == [0, 1]
        tensors = [value for slot in state.values() for value in slot.values()]
        return [t.detach().clone() for t in [*tensors, *self.model.parameters()]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_refused_load_changes_no_state_when_a_parameter_is_frozen(
    dtype: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, dtype)
    run.step()
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.freeze("a")
    run.optimizer = run.built()
    run.step()
    before = copy.deepcopy(run.optimizer.state_dict())
    assert [*before["state"]] == [1]
    for index, key in ((0, "exp_avg"), (1, "exp_avg_sq")):
        wrong = copy.deepcopy(saved)
        wrong["state"][index][key] = torch.zeros(5)
        with pytest.raises(ValueError, match=f"{'ab'[index]}.{key}: saved shape"):
            run.optimizer.load_state_dict(wrong)
        now = run.optimizer.state_dict()["state"]
        assert [*now] == [1]
        assert all(same_bits(now[1][key], value) for key, value in before["state"][1].items())
    run.optimizer.load_state_dict(saved)
    assert [*run.optimizer.state_dict()["state"]] == [0, 1]
