"""Functions of Megatron's optimizer that programs replace are called, or refused by name."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import megatron_patches as tool
import pytest
import torch
from torch import nn

from support.one_rank import one_rank

core = pytest.importorskip("megatron.core.optimizer")

from mp_optim.apps import megatron  # noqa: E402

LISTED = tool.listed()


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    yield
    megatron.uninstall()


def build() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return core.get_megatron_optimizer(core.OptimizerConfig(lr=1e-2), [model])


def own(*arguments: Any, **settings: Any) -> None:
    """Stand-in for a function that replaces one of Megatron's."""


class OwnAdam(torch.optim.SGD):
    """Stand-in for a class that replaces Megatron's Adam."""


def put(patch: pytest.MonkeyPatch, part: str) -> None:
    """Replace a function or class by its full name. Skip the test if the installed Megatron lacks
    the name."""
    path, _, name = part.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        path, _, kind = path.rpartition(".")
        owner = getattr(importlib.import_module(path), kind, None)
    if not hasattr(owner, name):
        pytest.skip(f"no {part}")
    patch.setattr(owner, name, own if "Adam" not in name else OwnAdam)


@pytest.mark.parametrize("part", [part for part in LISTED if LISTED[part] == "refused"])
def test_megatron_install_names_a_replaced_megatron_function_that_is_not_supported(
    part, monkeypatch
):
    if not part.endswith("__new__"):
        check_refusal(part, monkeypatch)
        return
    # Python cannot restore a class whose __new__ was replaced, so replace it in a child process.
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            check_refusal(part, monkeypatch)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def check_refusal(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = rf"{part.rpartition('.')[2]} (is|by) .*test_patches\.(own|OwnAdam)"
    is_factory = part.endswith(("get_megatron_optimizer", "get_megatron_muon_optimizer"))
    if not is_factory:
        megatron.install()
        with monkeypatch.context() as patch:
            put(patch, part)
            with pytest.raises(RuntimeError, match=said):
                build()
        assert build().param_groups
        megatron.uninstall()
    put(monkeypatch, part)
    with pytest.raises(RuntimeError, match=said):
        megatron.install()


def test_megatron_install_accepts_a_class_that_gains_attributes_while_it_is_checked(monkeypatch):
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            core.ChainedOptimizer.loaded = True
            raise AttributeError(name)

    monkeypatch.setattr(core.ChainedOptimizer, "lazy", Lazy(), raising=False)
    # An attribute after the lazy object makes the loop go on.
    monkeypatch.setattr(core.ChainedOptimizer, "later", None, raising=False)
    megatron.install()
    assert core.ChainedOptimizer.loaded
    del core.ChainedOptimizer.loaded


def test_get_megatron_optimizer_calls_a_replaced_get_param_groups_after_install(monkeypatch):
    megatron.install()
    theirs = core._get_param_groups

    def with_rates(chunks: Any, *arguments: Any) -> list[dict[str, Any]]:
        groups = theirs(chunks, *arguments)
        return [{**group, "max_lr": 3e-5 if group["wd_mult"] else 7e-5} for group in groups]

    with one_rank():
        monkeypatch.setattr(core, "_get_param_groups", with_rates)
        optimizer = build()
        rates = {group["wd_mult"]: group["lr"] for group in optimizer.param_groups}
        assert rates == {1.0: 3e-5, 0.0: 7e-5}
        names = [name for group in optimizer.param_groups for name in group["param_names"]]
        assert sorted(names) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        model = nn.Linear(4, 4)
        config = core.OptimizerConfig(optimizer="muon", lr=1e-2)
        with pytest.raises(
            RuntimeError, match=r"_get_param_groups by .*with_rates.*--optimizer muon"
        ):
            core.get_megatron_optimizer(config, [model])


def test_install_reaches_a_program_that_imported_the_factory_under_another_name(monkeypatch):
    program = ModuleType("a_program")
    program.build_native = theirs = core.get_megatron_optimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, program.__name__, program)
    megatron.install()
    assert program.build_native is megatron.get_megatron_optimizer
    megatron.uninstall()
    assert program.build_native is theirs
