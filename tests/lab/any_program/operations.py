"""Operations: rules of the machine that are named, written down, counted, and can be left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis.stateful import precondition, rule

from lab.any_program.subject import NotNow

Rule = TypeVar("Rule", bound=Callable[..., None])


def operation(**strategies: Any) -> Callable[[Rule], Any]:
    def decorate(function: Rule) -> Any:
        name = function.__name__
        return precondition(lambda self: name not in self.without)(
            rule(**strategies)(counted(function))
        )

    return decorate


def counted(function: Rule) -> Rule:
    def call(self: Any, **arguments: Any) -> None:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        self.lines.append(f"state.{function.__name__}({given})")
        with self.watched(), contextlib.suppress(NotNow):
            function(self, **arguments)
            self.counts["operations"] += 1
            self.counts[function.__name__] += 1
            self.subject.check_model(self.oracle)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call  # type: ignore[return-value]
