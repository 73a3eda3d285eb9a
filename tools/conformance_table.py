#!/usr/bin/env python
"""The table of docs/conformance.md: the kit carried out on optimizers of the registry.

    pip install torchao bitsandbytes schedulefree ...   # what is not there is left out
    python tools/conformance_table.py                   # all of them
    python tools/conformance_table.py --only prodigyopt # one package again

Findings go to docs/conformance.json, and the table is made of that.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tyro

from mp_optim.apps.conform import CHECKS, LEVELS, Subject, run
from mp_optim.apps.conform.runner import FAILS, OTHER, REFUSES

ROOT = Path(__file__).parents[1]
FINDINGS = ROOT / "docs/conformance.json"
BEGIN, END = "<!-- the table, by tools/conformance_table.py -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Row:
    """A line of the table: a package of the registry, the name it has there, and whom to check."""

    package: str
    subject: Subject


ROWS = [
    Row("torch", Subject("torch.optim.AdamW")),
    Row("torch", Subject("torch.optim.SGD", {"lr": 1e-2})),
    Row("torch", Subject("torch.optim.Adafactor")),
    Row("torch", Subject("torch.optim.Muon")),
    Row("torchao", Subject("conformance_subjects.torchao_adamw8bit", rule="adamw")),
    Row("bitsandbytes", Subject("bitsandbytes.optim.AdamW", rule="adamw")),
    Row("bitsandbytes", Subject("bitsandbytes.optim.AdamW8bit", rule="adamw")),
    Row("deepspeed", Subject("deepspeed.ops.adam.DeepSpeedCPUAdam", rule="adamw")),
    Row(
        "transformers",
        Subject(
            "transformers.optimization.Adafactor",
            {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "warmup_init": False},
        ),
    ),
    Row("timm", Subject("timm.optim.AdamWLegacy", rule="adamw")),
    Row("timm", Subject("timm.optim.Lamb")),
    Row("pytorch-optimizer", Subject("pytorch_optimizer.Lion", rule="lion")),
    Row("pytorch-optimizer", Subject("pytorch_optimizer.StableAdamW")),
    Row("pytorch-optimizer", Subject("pytorch_optimizer.SOAP")),
    Row("heavyball", Subject("conformance_subjects.heavyball_adamw", rule="adamw")),
    Row("schedulefree", Subject("schedulefree.AdamWScheduleFree")),
    Row("prodigyopt", Subject("prodigyopt.Prodigy")),
    Row("dadaptation", Subject("dadaptation.DAdaptAdam")),
    Row("lion-pytorch", Subject("lion_pytorch.Lion", rule="lion")),
    Row("galore-torch", Subject("conformance_subjects.galore_adamw")),
    Row("apollo-torch", Subject("apollo_torch.APOLLOAdamW")),
    Row("came-pytorch", Subject("came_pytorch.CAME", {"lr": 1e-3})),
    Row("adam-mini", Subject("conformance_subjects.adam_mini")),
    Row("muon-optimizer", Subject("muon.SingleDeviceMuon")),
    Row("torch-optimi", Subject("optimi.AdamW", {"lr": 1e-3}, "adamw")),
    Row("torch-optimizer", Subject("torch_optimizer.RAdam")),
    Row("adabelief-pytorch", Subject("adabelief_pytorch.AdaBelief", {"print_change_log": False})),
    Row("grokadamw", Subject("grokadamw.GrokAdamW")),
    Row("mp_optim", Subject("mp_optim.AdamW")),
    Row("mp_optim", Subject("mp_optim.Muon")),
]


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    only: tuple[str, ...] = ()
    """Packages to check again; the others' lines stay as they are."""
    alone: bool = False
    """Leave out what takes two ranks."""


def look(row: Row, alone: bool) -> dict[str, Any]:
    """What the kit finds of one optimizer: how many checks of each level apply, and what did not
    pass."""
    checks = [check.name for check in row.subject.checks() if check.ranks == 1 or not alone]
    outcomes = list(run(row.subject, checks))
    applied = Counter(each.check.level for each in outcomes if each.status != OTHER)
    return {
        "package": row.package,
        "version": metadata.version(row.package),
        "settings": {name: str(value) for name, value in row.subject.settings.items()},
        "applied": dict(applied),
        "found": {each.name: (each.status, each.message) for each in outcomes if not each.passed},
    }


def line(path: str, entry: dict[str, Any]) -> str:
    """An optimizer's line: by level how many checks passed of those that apply, and what failed."""
    names = [name for name, (status, _) in entry["found"].items() if status == FAILS]
    failed = Counter(CHECKS[name].level for name in names)
    applied = entry["applied"]
    cells = [f"{applied[level] - failed[level]}/{applied[level]}" for level in LEVELS]
    refusals = sum(status == REFUSES for status, _ in entry["found"].values())
    shown = path.replace("conformance_subjects.", "")
    fails = [f"`{name}`" for level in LEVELS[:2] for name in names if CHECKS[name].level == level]
    what = f"{entry['package']} {entry['version']}".removesuffix("+cpu")
    return f"| {what} | `{shown}` | {' | '.join(cells)} | {refusals} | {', '.join(fails) or '-'} |"


def table(findings: dict[str, Any]) -> str:
    """The whole table."""
    head = "| package | optimizer | must | should | nice | refuses | fails of must and should |"
    rows = [row.subject.path for row in ROWS if row.subject.path in findings]
    lines = [head, "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(line(path, findings[path]) for path in rows)])


def main(options: Options) -> None:
    """Check, keep what was found, and write the table into the page."""
    findings = json.loads(FINDINGS.read_text()) if FINDINGS.exists() else {}
    for row in ROWS:
        if options.only and row.package not in options.only:
            continue
        try:
            findings[row.subject.path] = look(row, options.alone)
        except (ValueError, ImportError) as error:
            print(f"{row.subject.path}: {error}", flush=True)
            continue
        lines = [f"{json.dumps(key)}: {json.dumps(findings[key])}" for key in findings]
        FINDINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(line(row.subject.path, findings[row.subject.path]), flush=True)
    page = ROOT / "docs/conformance.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{table(findings)}\n\n{END}{after}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
