"""Check a torch optimizer for properties that training programs rely on.

$ mp-optim conform torch.optim.AdamW
$ mp-optim conform package.Optimizer --args lr=1e-3 state_dtype=torch.bfloat16 --rule adamw
$ mp-optim conform torch.optim.AdamW --only a_loaded_state_is_a_copy
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from mp_optim.apps.conform import CHECKS, Subject, command_of, run
from mp_optim.apps.conform.kit import parsed
from mp_optim.apps.conform.runner import FAILS


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    optimizer: tyro.conf.Positional[str] = ""
    """Dotted name of a class, or of a function that takes parameters and settings."""
    args: tuple[str, ...] = ()
    """Keyword arguments of the optimizer, as name=value."""
    rule: Annotated[str, tyro.conf.arg(metavar="{adam,adamw,sgd,lion,none}")] = ""
    """Rule whose formula the optimizer follows. The default is the optimizer's name in lower
    case, if that is a rule."""
    only: tuple[str, ...] = ()
    """Names of the checks to run. The default runs all checks."""
    level: Literal["must", "should"] = "must"
    """Lowest level of a check whose failure sets exit status 1."""
    list: bool = False
    """True to list all checks, and run none."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line, and return the exit status."""
    options = tyro.cli(Options, args=arguments, prog="mp-optim conform", description=__doc__)
    if options.list:
        for check in CHECKS.values():
            rules = f" ({', '.join(check.rules)})" if check.rules else ""
            print(f"{check.level:6} {check.name}{rules}: {check.statement}")
        return 0
    subject = Subject(options.optimizer, dict(map(parsed, options.args)), options.rule)
    subject.maker()
    failed = []
    counts = Counter[str]()
    for outcome in run(subject, options.only):
        check, message = CHECKS[outcome.name], f": {outcome.message}" if outcome.message else ""
        print(f"{check.level:6} {outcome.status:14} {check.name}{message}", flush=True)
        counts[outcome.status] += 1
        if outcome.status == FAILS:
            failed.append(check.level)
            print(f"{'':21} {check.statement}\n{'':21} {command_of(check, subject)}")
    print(f"{options.optimizer}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    sys.stdout.flush()
    return int("must" in failed or options.level in failed)
