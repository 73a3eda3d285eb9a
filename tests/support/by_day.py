"""Full products of cases are for the night (``slow``); by day each value meets some of the others.
Ranks that carry out cases for the tests of a module are told which of them are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # no rank needs it

DAY, NIGHT = "day", "night"


def asked_for(request: pytest.FixtureRequest) -> list[str]:
    """Whether tests of the module run that are for the day, for the night, or both."""
    tests = [item for item in request.session.items if item.path == request.path]
    return sorted({NIGHT if item.get_closest_marker("slow") else DAY for item in tests})


def is_asked_for(is_by_day: bool, times: tuple[str, ...]) -> bool:
    """True if ``times`` selects a case that runs by day, or one that runs at night."""
    return (DAY if is_by_day else NIGHT) in times
