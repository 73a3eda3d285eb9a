"""``pytest -p mp_optim.apps.conform.pytest_plugin --conform package.Class``: every check that
applies is
a test.

Without paths on the command line these are all tests; with paths they come beside them. It is no
entry point of pytest, which would import this package, and torch, in every run of an environment.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from mp_optim.apps.conform.kit import Check, Subject, parsed
from mp_optim.apps.conform.runner import OTHER, Outcome, program_of, run


class Finding(Exception):
    """A check that failed: what was found, and the program that shows it."""


class CheckItem(pytest.Item):
    """One check of the optimizer."""

    def __init__(self, *, check: Check, subject: Subject, **rest: Any) -> None:
        super().__init__(**rest)
        self.check, self.subject = check, subject
        self.add_marker(check.level)

    def runtest(self) -> None:
        outcome = _outcome_of(self)
        if outcome.status == OTHER:
            pytest.skip(outcome.message)
        if outcome.failed:
            program = program_of(self.check, self.subject)
            raise Finding(f"{outcome.message}\n{self.check.statement}\n\n{program}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        is_finding = isinstance(excinfo.value, Finding)
        return str(excinfo.value) if is_finding else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.subject.path}: {self.check.name} ({self.check.level})"


_RUNNING = pytest.StashKey[Generator[Outcome, None, None]]()
_FOUND = pytest.StashKey[dict[str, Outcome]]()


def _outcome_of(item: CheckItem) -> Outcome:
    """The outcome of an item; all that were chosen are carried out together, in their order."""
    stash = item.session.stash
    if _RUNNING not in stash:
        chosen = [each for each in item.session.items if isinstance(each, CheckItem)]
        stash[_RUNNING] = run(item.subject, [each.check.name for each in chosen])
        stash[_FOUND] = {}
    running, found = stash[_RUNNING], stash[_FOUND]
    while item.check.name not in found:
        outcome = next(running)
        found[outcome.name] = outcome
    return found[item.check.name]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conform", "checks of a torch optimizer")
    group.addoption("--conform", metavar="NAME", help="dotted name of an optimizer to check")
    group.addoption("--conform-args", nargs="+", default=[], metavar="NAME=VALUE", help="settings")
    group.addoption("--conform-rule", default="", metavar="RULE", help="adam, adamw, sgd, lion")


def pytest_configure(config: pytest.Config) -> None:
    for level in ("must", "should", "nice"):
        config.addinivalue_line("markers", f"{level}: level of a check of mp_optim.apps.conform")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> object:
    """The checks are all that is collected, where no paths were given."""
    from_arguments = session.config.args_source is pytest.Config.ArgsSource.ARGS
    if from_arguments or not session.config.option.conform:
        return None
    session.items = []
    hook = session.config.hook
    hook.pytest_collection_modifyitems(session=session, config=session.config, items=session.items)
    hook.pytest_collection_finish(session=session)
    session.testscollected = len(session.items)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    options = session.config.option
    if not options.conform:
        return
    settings = dict(map(parsed, options.conform_args))
    subject = Subject(options.conform, settings, options.conform_rule)
    subject.maker()
    for check in subject.checks():
        made = CheckItem.from_parent(session, name=check.name, check=check, subject=subject)
        items.append(made)
