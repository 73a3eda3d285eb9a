"""``mp_optim/host/accelerator.py`` is the only module that calls torch.cuda."""

import ast
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, call

import torch

import mp_optim
from mp_optim.host import accelerator
from mp_optim.host.accelerator import CUDA

PACKAGE = Path(mp_optim.__file__).parent


def names_of_cuda(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda") or (
            isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.cuda")
        ):
            yield node.lineno


def test_package_uses_torch_cuda_only_in_the_module_host_accelerator():
    named = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := list(names_of_cuda(path)))
    }
    assert named.pop("host/accelerator.py")
    assert named == {}


def test_accelerator_of_returns_none_for_cpu_and_meta(monkeypatch):
    monkeypatch.setattr(accelerator.CUDA, "is_capturing", lambda: True)
    cpu, cuda, meta = (accelerator.torch.device(name) for name in ("cpu", "cuda", "meta"))
    assert accelerator.accelerator_of(cuda) is accelerator.CUDA
    assert accelerator.accelerator_of(cpu) is accelerator.accelerator_of(meta) is None
    assert accelerator.is_capturing(cuda) and not accelerator.is_capturing(cpu)
    with accelerator.current_device(cpu):
        pass


def test_cuda_accelerator_calls_matching_torch_cuda_functions(monkeypatch):
    cuda, device = MagicMock(), torch.device("cuda", 1)
    monkeypatch.setattr(torch, "cuda", cuda)
    stream = CUDA.stream(device)
    with CUDA.on(device), CUDA.queue_on(stream):
        CUDA.event(sleeps=True)
    CUDA.is_capturing()
    assert [each for each in cuda.mock_calls if "__" not in str(each)] == [
        call.Stream(device),
        call.device(device),
        call.stream(stream),
        call.Event(blocking=True),
        call.is_current_stream_capturing(),
    ]
