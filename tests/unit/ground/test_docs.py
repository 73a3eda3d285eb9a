"""What the documents say exists, and what they tell people to type works."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import tyro
from torch import nn

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@each_document
def test_named_tests_exist(document):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    assert {name for name in named if f"def {name}(" not in sources} == set()


@each_document
def test_links_and_files_exist(document):
    text = document.read_text()
    linked = [document.parent / link for link in re.findall(r"\]\((?!http|#)([^)#]+)", text)]
    named = [ROOT / path for path in re.findall(r"`((?:docs|mp_optim|tests|tools)/[\w/.]+\.\w+)`", text)]
    assert [path for path in (*linked, *named) if not path.exists()] == []


def test_the_readme_example_runs():
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    model = nn.Linear(4, 4).bfloat16()
    loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
    names = {"model": model, "loss": loss}
    exec(snippet, names)
    assert names["success"] and names["grad_norm"] > 0


class FromElsewhere:
    """Stands for a Megatron or apex optimizer over a model: state by position, FP32 copies beside it."""

    def __init__(self, model):
        params = list(model.parameters())
        self.param_groups_master = [{"params": [param.detach().float() for param in params]}]
        self._inner = {"state": {i: {"exp_avg": torch.ones(p.shape), "exp_avg_sq": torch.ones(p.shape)}
                                 for i, p in enumerate(params)},
                       "param_groups": [{"lr": 1e-3, "step": 2, "params": list(range(len(params)))}]}


class Megatron(FromElsewhere):
    """Its inner optimizer's param groups hold the FP32 copies, which parameters know as ``main_param``."""

    def __init__(self, model):
        super().__init__(model)
        self.param_groups = self.param_groups_master
        self.model = model

    @property
    def optimizer(self):
        for param, copy in zip(self.model.parameters(), self.param_groups[0]["params"], strict=True):
            param.main_param = copy  # of which the model has another since an optimizer of ours was built for it
        return self

    def state_dict(self):
        return {"optimizer": self._inner, "fp32_from_fp16_params": [g["params"] for g in self.param_groups_master]}


class Apex(FromElsewhere):
    def state_dict(self):
        return self._inner


def train_some_steps(model, fp32, optimizer):
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
    for name, param in model.named_parameters():
        fp32[name].grad = param.grad.float()
    optimizer.step()


def test_the_way_from_other_libraries_runs(tmp_path, monkeypatch):
    """Every block of docs/migrate.md in order: Python as it stands, commands as their programs take them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from convert_checkpoint import Options, main

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()
    names = {"model": model, "torch": torch, "train_some_steps": train_some_steps,
             "megatron_optimizer": Megatron(model), "fused_adam": Apex(model)}
    blocks = re.findall(r"```(python|bash)\n(.*?)```", (ROOT / "docs/migrate.md").read_text(), re.DOTALL)
    for language, block in blocks:
        if language == "python":
            exec(block, names)
            continue
        for line in block.strip().splitlines():
            program, *arguments = shlex.split(line)[1:]
            assert program == "tools/convert_checkpoint.py"
            main(tyro.cli(Options, args=arguments))
    written = {path.name for path in tmp_path.iterdir()}
    assert {"from_torch.pt", "from_megatron.pt", "from_apex.pt", "from_deepspeed.pt", "for_torch"} <= written
    foreign = names["foreign"]
    for source in ("from_megatron.pt", "from_apex.pt"):
        foreign.import_state(names["optimizer"], foreign.from_file(tmp_path / source))
        assert all(float(state["step"]) == 2.0 for state in foreign.export_state(names["optimizer"]).state.values())
