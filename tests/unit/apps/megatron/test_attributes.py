"""Attributes that Megatron's optimizer reads are listed, and are read or refused as listed."""

import ast
import importlib.util
import os
from pathlib import Path

import megatron_attributes as tool
import pytest
from torch import nn

import mp_optim
from mp_optim import OptimizerConfig, ParamKey, get_megatron_optimizer
from mp_optim.core.param_attributes import REFUSED

PACKAGE = Path(mp_optim.__file__).parent
ANSWERS = tool.answers()


def sources() -> list[Path]:
    checkout = os.environ.get("MEGATRON_SRC")
    spec = importlib.util.find_spec("megatron")
    installed = list(spec.submodule_search_locations or ()) if spec else []
    named = [Path(checkout)] if checkout else []
    return [*named, *(Path(folder).parent for folder in installed)]


@pytest.mark.skipif(not sources(), reason="no Megatron is here")
def test_attribute_list_has_every_attribute_megatron_reads():
    for source in sources():
        if (source / "megatron" / "core" / "optimizer").is_dir():
            assert not tool.unlisted(tool.read_in(source)), source


def words_of_the_package() -> set[str]:
    words = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
    return words


def names(owner: str, kind: str) -> set[str]:
    return {name for name, answer in ANSWERS[owner].items() if answer == kind}


@pytest.mark.parametrize("owner", ANSWERS)
def test_package_reads_megatron_attributes_listed_as_read(owner):
    by_torch = {"_local_tensor"}  # The package calls to_local() instead.
    assert not names(owner, "read") - words_of_the_package() - by_torch


def test_attribute_list_marks_exactly_the_refused_parameter_attributes_as_refused():
    assert names("parameter", "refused") == REFUSED.keys()


@pytest.mark.parametrize("name", sorted(names("group", "refused")))
def test_config_override_refuses_group_attribute_listed_as_refused(name):
    overrides = {ParamKey(name="*"): {name: True}}
    with pytest.raises(ValueError, match=rf"override {name}=True"):
        get_megatron_optimizer(OptimizerConfig(lr=1e-2), nn.Linear(2, 2), overrides)
