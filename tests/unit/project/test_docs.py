"""Names, links, commands and examples of the documents are correct."""

import ast
import dataclasses
import importlib
import itertools
import operator
import re
import shlex
from copy import deepcopy
from pathlib import Path

import api_reference
import pytest
import torch
import tyro
import write_docs
from torch import nn

import mp_optim
from lab.__main__ import COMMANDS as LAB
from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.apps.cli.command import COMMANDS, main
from support.faults import faulty, written_wrong
from support.launch import ROOT, run_forked_program

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "docs/llms.txt",
]
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@each_document
def test_docs_name_only_existing_tests(document):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    assert {name for name in named if f"def {name}(" not in sources} == set()


@each_document
def test_docs_link_only_existing_files(document):
    text = document.read_text()
    linked = [document.parent / link for link in re.findall(r"\]\((?!http|#)([^)#]+)", text)]
    named = [
        ROOT / path for path in re.findall(r"`((?:docs|mp_optim|tests|tools)/[\w/.]+\.\w+)`", text)
    ]
    assert [path for path in (*linked, *named) if not path.exists()] == []


def test_code_names_only_existing_pages():
    """Docstrings and error messages may name a page of docs/."""
    sources = [*(ROOT / "mp_optim").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 5 and {name for name in named if not (ROOT / name).exists()} == set()


@each_document
def test_docs_link_only_anchors_that_a_code_host_generates(document):
    """mkdocs checks the anchors of the site; a code host makes anchors from headings too."""
    links = re.findall(r"\]\((?!http)([^)\s#]*\.md)?#([^)\s]+)", document.read_text())
    targets = [(document.parent / path if path else document, name) for path, name in links]
    assert [(path, name) for path, name in targets if name not in anchors_of(path)] == []


def anchors_of(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,6} (.*)", text, re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    anchors = [re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in shown]
    return {*anchors, *re.findall(r' id="([\w-]+)"', text)}


def blocks_of(name, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def small_model():
    torch.manual_seed(0)  # Of 300 seeds, 7 make weights that one small step does not change.
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()


def loss_of(model):
    return model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()


def test_every_python_block_of_the_docs_has_a_test():
    """The table counts the Python blocks of each page. Each block has a test in this module, in
    test_site.py, functional/test_few_lines.py, unit/apps/megatron/test_install.py or
    unit/checkpoint/test_other_worlds.py."""
    counts = {path: len(blocks_of(path, "python")) for path in DOCUMENTS}
    assert {str(path.relative_to(ROOT)): count for path, count in counts.items() if count} == {
        "README.md": 3,
        "docs/fsdp2.md": 1,
        "docs/many_ranks.md": 1,
        "docs/troubleshooting.md": 1,
        "docs/checkpoints.md": 2,
        "docs/settings.md": 2,
        "docs/recipes.md": 1,
        "docs/outside_writes.md": 1,
        "docs/audit.md": 2,
        "docs/health.md": 2,
        "docs/deltas.md": 2,
        "docs/migrate.md": 9,
        "docs/index.md": 1,
        "docs/quickstart.md": 4,
        "docs/clients/hf_trainer.md": 6,
        "docs/clients/accelerate.md": 2,
        "docs/clients/torchtitan.md": 1,
        "docs/clients/megatron.md": 1,
        "docs/clients/index.md": 3,
        "docs/llms.txt": 6,
    }


@each_document
def test_docs_equal_their_generated_parts(document):
    text = document.read_text()
    assert write_docs.page(text) == text, "run: python tools/write_docs.py"


def test_readme_has_at_most_1100_words():
    """A reader spends about two minutes on README.md."""
    assert len((ROOT / "README.md").read_text().split()) <= 1100


IMPORTED = {"mp_optim", "torch", "nn", "dist", "json", "os", "convert", "np", "transformers"}
"""Modules that blocks must import. Data (``model``, ``optimizer``) comes from the reader's program.
"""


@each_document
def test_python_blocks_of_the_docs_import_each_module_they_name(document):
    bound, missing = set(), set()
    for block in blocks_of(document, "python"):
        nodes = [*ast.walk(ast.parse(block))]
        names = [node for node in nodes if isinstance(node, ast.Name)]
        imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        aliases = [alias for node in imports for alias in node.names]
        bound |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
        bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        missing |= {node.id for node in names} - bound
    assert {one for one in missing if one in IMPORTED or hasattr(mp_optim, one)} == set()


def test_api_reference_lists_every_public_name():
    texts = [path.read_text() for path in (ROOT / "docs/api").glob("*.md")]
    shown = {
        name.removeprefix("mp_optim.") for text in texts for name in api_reference.documented(text)
    }
    shown |= {*re.findall(r"`(\w+)` (?:and `\w+` )?are other names of", "".join(texts))}
    shown |= {*re.findall(r"`\w+` and `(\w+)` are other names of", "".join(texts))}
    assert {*mp_optim.__all__} - {*shown, "checkpoint"} == set()
    assert "checkpoint.save" in shown


def test_design_glossary_names_existing_classes_and_functions():
    """The last column of the glossary names a class, a function or a constant of the package."""
    names = re.findall(r"\| ([^|]*`) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    code = "\n".join(path.read_text() for path in (ROOT / "mp_optim").rglob("*.py"))
    words = {word for name in names for word in re.findall(r"`(\w+)`", name)}
    assert len(words) > 8
    unknown = [w for w in words if not re.search(rf"^\s*((class|def) )?{w}\b *[(=:\[]", code, re.M)]
    assert unknown == []


def test_design_page_names_only_identifiers_of_the_code():
    named = re.findall(
        r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*?\))?`", (ROOT / "docs/design.md").read_text()
    )
    code = "\n".join(path.read_text() for path in (ROOT / "mp_optim").rglob("*.py"))
    words = {word for name in named for word in name.split(".")}
    assert len(words) > 80
    assert {word for word in words if not re.search(rf"\b{word}\b", code)} == set()


def test_docs_name_only_existing_class_members():
    """`Class.member` names a member of that class or of a base class."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "mp_optim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(_members(node))
                named = (ast.unparse(base).partition("[")[0] for base in node.bases)
                bases.setdefault(node.name, set()).update(named)

    def has(name: str, member: str) -> bool:
        if name not in members:
            # These bases belong to another package.
            return name not in ("ABC", "NamedTuple", "Protocol")
        return member in members[name] or any(has(base, member) for base in bases[name])

    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"]
    named = {
        (page.name, *pair)
        for page in pages
        for pair in re.findall(r"`(?:mp_optim\.)?([A-Z]\w+)\.(\w+)", page.read_text())
        if pair[0] in members and pair[1] != "py"
    }
    assert len(named) > 20
    assert [each for each in sorted(named) if not has(*each[1:])] == []


def _members(node: ast.ClassDef) -> set[str]:
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(inner.name)
        elif isinstance(inner, (ast.Name, ast.Attribute)) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
    return names


def test_contributing_lists_every_file_that_a_new_rule_touches():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = text[text.index("\n## Rules\n") : text.index("\n## Backends\n")]
    named = set(re.findall(r"`(mp_optim/[\w/]+\.\w+)`", recipe))
    files = named - {"mp_optim/config/setting_checks.py"}
    assert [name for name in files if "lion" not in (ROOT / name).read_text().lower()] == []
    assert len(files) == 9 and "touches nine files; Lion shows all" in recipe


@pytest.mark.parametrize(("document", "count"), [("troubleshooting.md", 20), ("llms.txt", 9)])
def test_docs_quote_only_messages_of_the_package(document, count):
    texts = []
    for path in (ROOT / "mp_optim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(_constant(part) for part in node.values))
            else:
                texts.append(_constant(node))
    text = (ROOT / "docs" / document).read_text()
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("|")]
    quoted = [(row, part) for row in rows for part in re.findall(r'"([^"]+ [^"]+)"', row)]
    ours = [part for row, part in quoted if "(torch's)" not in row]
    assert len(ours) > count
    everything = "\n".join(texts)
    found = (part in everything or re.sub(r"\d+", "", part) in everything for part in ours)
    assert list(itertools.compress(ours, map(operator.not_, found))) == []


def _constant(node):
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""


def test_readme_example_steps_and_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = small_model()
    names = {"model": model, "loss": loss_of(model)}
    adamw, _, _ = blocks_of("README.md", "python")
    exec(adamw, names)
    assert names["optimizer"].last_step.success and (tmp_path / "run" / "latest").exists()


@pytest.fixture
def one_rank(monkeypatch):
    """Set the environment of a job of one rank; end the process group after the test."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_llms_txt_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.distributed.init_process_group("gloo")
    batch = torch.ones(2, 4)
    names = {
        "loss_of": lambda model: model(batch.to(model[0].weight.dtype)).float().square().mean(),
        "arguments": None,
        "Trainer": lambda model, arguments, optimizer_cls_and_kwargs: optimizer_cls_and_kwargs,
    }
    for block in blocks_of("docs/llms.txt", "python"):
        names["model"] = small_model()
        exec(block, names)
    assert names["extra"] == {"step": 1} and names["success"]
    assert names["trainer"][0] is mp_optim.AdamW
    assert isinstance(names["optimizer"], mp_optim.Muon)


@pytest.mark.usefixtures("one_rank")
def test_many_ranks_and_fsdp2_examples_of_the_docs_take_steps():
    model = small_model()
    before = model[0].weight.detach().clone()
    names = {"model": model, "micro_batches": [0, 1, 2], "loss_of": lambda batch: loss_of(model)}
    (zero,) = blocks_of("docs/many_ranks.md", "python")
    (fsdp2,) = blocks_of("docs/fsdp2.md", "python")
    exec(zero, names)
    assert not torch.equal(model[0].weight.detach(), before)
    for block in (fsdp2, blocks_of("README.md", "python")[2]):
        names["model"] = model = small_model()
        model.layers = [model[0]]
        exec(block, names)
        loss_of(model).backward()
        names["optimizer"].step()
        assert names["optimizer"].last_step.success


def test_checkpoint_examples_of_the_docs_run(tmp_path, monkeypatch):
    model = small_model()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), model)
    loss_of(model).backward()
    optimizer.step()
    names = {
        "model": model,
        "optimizer": optimizer,
        "path": tmp_path / "PATH",
        "folder": tmp_path / "tensors",
    }
    for block in blocks_of("docs/checkpoints.md", "python"):
        exec(block, names)
    assert names["extra"] == {} and list((tmp_path / "tensors").glob("*.safetensors"))
    mp_optim.checkpoint.save(tmp_path / "OTHER", model, optimizer)
    monkeypatch.chdir(tmp_path)
    for line in blocks_of("docs/checkpoints.md", "bash")[0].strip().splitlines():
        words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)
        assert words[:2] == ["mp-optim", "inspect"] and main(words[1:]) == 0


def test_audit_example_of_the_docs_restores_weights_after_a_fault(capsys, tmp_path):
    settings, goes_back = blocks_of("docs/audit.md", "python")
    names = {}
    exec(settings, names)
    config = dataclasses.replace(names["config"], audit_rate=1.0, audit_action="raise")
    model = small_model()
    optimizer = mp_optim.get_megatron_optimizer(config, model)
    loss_of(model).backward()
    optimizer.step()
    mp_optim.checkpoint.save(tmp_path, model, optimizer)
    saved = [param.clone() for param in model.parameters()]
    names |= {"model": model, "optimizer": optimizer, "newest": tmp_path}
    loss_of(model).backward()
    with faulty(written_wrong("output", 3)):
        exec(goes_back, names)
    assert "element 3, param" in capsys.readouterr().out
    assert all(map(torch.equal, model.parameters(), saved))
    optimizer.step()


def test_settings_examples_of_the_docs_set_the_overrides(capsys):
    overrides, plans = blocks_of("docs/settings.md", "python")
    known = {"model": nn.ModuleDict({"router": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})}
    exec(overrides, known)
    settings = {(group["lr"], group["weight_decay"]) for group in known["optimizer"].param_groups}
    assert settings == {(3e-5, 0.01), (3e-5, 0.0), (3e-4, 0.0)}
    exec(plans, {"model": small_model()})
    assert "moments" in capsys.readouterr().out


def test_average_and_qk_clip_examples_of_the_docs_change_weights():
    (averages,) = blocks_of("docs/recipes.md", "python")
    (clip,) = blocks_of("docs/outside_writes.md", "python")
    model, seen = small_model(), []

    def train(model, optimizer):
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()

    def evaluate(model):
        seen.append(loss_of(model).item())

    names = {"model": model, "train": train, "evaluate": evaluate}
    exec(averages, names)
    assert seen[0] != loss_of(model).item()
    attention = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key")})
    model = nn.ModuleDict({"attention": attention})
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0, clip_grad=0.0), model)
    before = attention["query"].weight.detach().clone()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    logits = torch.tensor([50.0, 400.0])
    exec(clip, {"optimizer": optimizer, "limit": 100, "largest_logit": logits, "head_dim": 4})
    halved = torch.tensor([1.0] * 4 + [0.5] * 4).view(8, 1)
    assert torch.equal(attention["query"].weight, before * halved)


def test_health_examples_of_the_docs_log_gradient_norms():
    model, blocks = small_model(), blocks_of("docs/health.md", "python")
    found = {
        "model": model,
        "batches": [(torch.ones(2, 4, dtype=torch.bfloat16), 0.0)] * 2,
        "loss_function": lambda outputs, target: (outputs.float() - target).square().mean(),
    }
    for block in blocks:
        exec(block, found)
    metrics = found["optimizer"].metrics()
    assert metrics["steps"] == 2 and "param_grad_norm/0.weight" in metrics


def test_delta_examples_of_the_docs_copy_the_weights(tmp_path):
    trainer, reader = blocks_of("docs/deltas.md", "python")
    model = small_model()
    receiver = deepcopy(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True), model)
    loss_of(model).backward()
    known = {"optimizer": optimizer, "folder": tmp_path, "replica": receiver}
    exec(trainer, known)
    assert known["delta"].changed > 0
    exec(reader, known)
    pairs = zip(model.parameters(), receiver.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def commands_in(document):
    text = document.read_text()
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    lines += re.findall(r"`((?:python|bash|torchrun) [^`]*(?:tools/|tests/lab )[^`]+)`", text)
    ours = r"(python|bash|torchrun)\b.* (tools/|tests/lab )"
    return [line for line in lines if re.match(ours, f"{line} ")]


LAUNCHED = {"tools/train.py"}
"""Programs that other tests run with existing files."""


def test_process_page_lists_every_environment_variable_that_is_read():
    page, names = (ROOT / "docs/process.md").read_text(), set()
    for path in (ROOT / "mp_optim").rglob("*.py"):
        text = path.read_text()
        # Programs under apps read their own variables.
        if "environ" in text and "apps" not in path.parts:
            names.update(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', text))
    assert {name for name in names if f"`{name}`" not in page} == set() and len(names) > 5


@each_document
def test_commands_of_the_docs_parse_with_their_programs(document):
    """Scripts exist, and programs accept the printed arguments."""
    for line in commands_in(document):
        words = shlex.split(line, comments=True)
        if words[1] == "tests/lab":
            command = importlib.import_module(LAB[words[2]][0])
            tyro.cli(command.Options, args=words[3:])
            continue
        index = next(i for i, word in enumerate(words) if word.startswith("tools/"))
        program, arguments = words[index], words[index + 1 :]
        assert (ROOT / program).exists(), line
        if (
            not program.endswith(".py")
            or program in LAUNCHED
            or program.startswith("tools/examples/")
        ):
            continue
        tool = importlib.import_module(Path(program).stem)
        if hasattr(tool, "Options") and arguments != ["--help"]:
            tyro.cli(tool.Options, args=arguments)
        else:
            assert not arguments or arguments == ["--help"], line


@each_document
def test_docs_name_only_existing_mp_optim_commands(document):
    assert set(re.findall(r"\bmp-optim (\w+)", document.read_text())) <= set(COMMANDS)


@pytest.mark.parametrize(
    ("tool", "document"),
    [("tools/fit_published.py", "docs/fit.md"), ("tools/fit_table.py", "docs/fit.md")],
)
@pytest.mark.slow
def test_fit_page_equals_the_output_of_its_tools(tool, document):
    written = run_forked_program(*tool.split(), timeout=1800)
    text = (ROOT / document).read_text()
    for part in written.strip().split("\n\n"):
        assert part in text, f"paste the output of python {tool}"


class FromElsewhere:
    def __init__(self, model):
        params = list(model.parameters())
        self.param_groups_master = [{"params": [param.detach().float() for param in params]}]
        self._inner = {
            "state": {
                i: {"exp_avg": torch.ones(p.shape), "exp_avg_sq": torch.ones(p.shape)}
                for i, p in enumerate(params)
            },
            "param_groups": [{"lr": 1e-3, "step": 2, "params": list(range(len(params)))}],
        }


class Megatron(FromElsewhere):
    """Stand-in: the groups hold FP32 copies, which parameters know as ``main_param``."""

    def __init__(self, model):
        super().__init__(model)
        self.param_groups = self.param_groups_master
        self.model = model

    @property
    def optimizer(self):
        for param, copy in zip(
            self.model.parameters(), self.param_groups[0]["params"], strict=True
        ):
            # An optimizer of ours replaced ``main_param`` since.
            param.main_param = copy
        return self

    def state_dict(self):
        return {
            "optimizer": self._inner,
            "fp32_from_fp16_params": [g["params"] for g in self.param_groups_master],
        }


class Apex(FromElsewhere):
    def state_dict(self):
        return self._inner


def train_some_steps(model, fp32, optimizer):
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
    for name, param in model.named_parameters():
        fp32[name].grad = param.grad.float()
    optimizer.step()


def test_migration_page_examples_convert_state_in_order(tmp_path, monkeypatch):
    """Python blocks run unchanged, and commands run with the arguments of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()
    names = {
        "model": model,
        "train_some_steps": train_some_steps,
        "megatron_optimizer": Megatron(model),
        "fused_adam": Apex(model),
    }
    blocks = re.findall(
        r"```(python|bash)\n(.*?)```", (ROOT / "docs/migrate.md").read_text(), re.DOTALL
    )
    for language, block in blocks:
        if language == "python":
            exec(block, names)
            continue
        for line in block.strip().splitlines():
            words = shlex.split(line)
            assert words[:2] == ["mp-optim", "convert"] and main(words[1:]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert {
        "from_torch.pt",
        "from_megatron.pt",
        "from_apex.pt",
        "from_deepspeed.pt",
        "for_torch",
    } <= written
    convert = names["convert"]
    for source in ("from_megatron.pt", "from_apex.pt"):
        convert.import_state(names["optimizer"], convert.from_file(tmp_path / source))
        assert all(
            float(state["step"]) == 2.0
            for state in convert.export_state(names["optimizer"]).state.values()
        )
