"""The pytest plugin's option alone: ``pytest --conform package.Class``.

pytest imports its plugins in every run of an environment. This file imports nothing; what it is
for, and torch with it, is imported where the option is given.
"""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("conform", "checks of a torch optimizer")
    group.addoption("--conform", metavar="NAME", help="dotted name of an optimizer to check")
    group.addoption("--conform-args", nargs="+", default=[], metavar="NAME=VALUE", help="settings")
    group.addoption("--conform-rule", default="", metavar="RULE", help="adam, adamw, sgd, lion")


def pytest_configure(config: Any) -> None:
    if config.getoption("--conform"):
        from mp_optim.conform import pytest_plugin

        config.pluginmanager.register(pytest_plugin)
