"""The package creates no tensor on the default device or in the default dtype."""

import ast

import pytest
from torch.utils._device import _device_constructors

from support.launch import ROOT

PACKAGE = ROOT / "mp_optim"
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}
TYPED_BY_DEFAULT = {"zeros", "ones", "empty", "eye", "rand", "randn", "linspace", "logspace"}
KERNELS = "triton/kernels/"  # ``tl.zeros`` and similar calls create no torch tensor.


def calls(source: str) -> list[tuple[int, str, set[str | None]]]:
    named = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CONSTRUCTORS
    ]
    return [
        (node.lineno, node.func.attr, {keyword.arg for keyword in node.keywords})
        for node in named
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    ]


def lacking(source: str) -> list[str]:
    found = []
    for line, name, keywords in calls(source):
        if "device" not in keywords:
            found.append(f"{line}: torch.{name} without device=")
        if name in TYPED_BY_DEFAULT and "dtype" not in keywords:
            found.append(f"{line}: torch.{name} without dtype=")
    return found


def test_constructor_scan_reports_a_missing_device_or_dtype():
    source = (
        "import torch\ntorch.zeros(3, dtype=torch.float32)\n"
        "torch.ones(2, device='cpu')\nself.zeros(1)\n"
    )
    assert lacking(source) == ["2: torch.zeros without device=", "3: torch.ones without dtype="]
    assert {"tensor", "as_tensor", "arange", "full"} <= CONSTRUCTORS


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_package_gives_every_tensor_constructor_a_device_and_dtype(path):
    if KERNELS not in path.as_posix():
        assert lacking(path.read_text()) == []
