"""One module speaks to the accelerator."""

import ast
from collections.abc import Iterator
from pathlib import Path

import mp_optim
from mp_optim.process import accelerator

PACKAGE = Path(mp_optim.__file__).parent


def names_of_cuda(path: Path) -> Iterator[int]:
    """Lines that name a part of torch which belongs to one kind of accelerator."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda") or (
            isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.cuda")
        ):
            yield node.lineno


def test_no_other_module_names_torch_cuda() -> None:
    named = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := list(names_of_cuda(path)))
    }
    assert named.pop("process/accelerator.py")
    assert named == {}


def test_the_host_is_no_accelerator(monkeypatch) -> None:
    monkeypatch.setattr(accelerator.CUDA, "is_capturing", lambda: True)
    cpu, cuda, meta = (accelerator.torch.device(name) for name in ("cpu", "cuda", "meta"))
    assert accelerator.accelerator_of(cuda) is accelerator.CUDA
    assert accelerator.accelerator_of(cpu) is accelerator.accelerator_of(meta) is None
    assert accelerator.is_capturing(cuda) and not accelerator.is_capturing(cpu)
    with accelerator.current_device(cpu):
        pass
