"""Forms of launches. Triton compiles a kernel once for each form.

Forms are recorded from launches. Each form can be launched again, on tensors of any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("launches.json")
"""Every recorded form. README.md names the programs, and the command that writes this file."""

_NAMED_IF_ON = ("cautious_wd", "follows")
"""Switches that a form leaves out if they are off."""


@dataclass(frozen=True, order=True)
class Form:
    """Values of a launch that Triton compiles into a kernel.

    Attributes:
        kernel: the kernel's name; for a kernel of a rule, the rule's name.
        constants: compiled-in values by name, as text.
        absent: pointers that are None.
        divisible: arguments that are multiples of 16.
        warps: warps of a block.
    """

    kernel: str
    constants: tuple[tuple[str, str], ...]
    absent: tuple[str, ...]
    divisible: tuple[str, ...]
    warps: int

    @property
    def values(self) -> dict[str, str]:
        return dict(self.constants)

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.constants if value not in ("False", "-")]
        return f"{self.kernel}: {' '.join(said)}"


def form_of(launch: Any) -> Form:
    constants: dict[str, str] = {}
    absent = []
    for name, value in launch.constants.items():
        if isinstance(value, tuple):  # flags, and dtypes of a kind
            named = zip(value._fields, value, strict=True)
            known = {part: each for part, each in named if each or part not in _NAMED_IF_ON}
            constants.update({part: _text(each) for part, each in known.items()})
        elif value is None:
            absent.append(name)
        elif name not in ("RULE", "CHUNK", "RUN"):
            constants[name] = _text(value)
    return Form(
        launch.function.name,
        tuple(sorted(constants.items())),
        tuple(sorted(absent)),
        tuple(sorted(launch.divisible)),
        launch.warps,
    )


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def read(file: Path = LIST) -> list[Form]:
    if not file.exists():
        return []
    return [
        Form(
            one["kernel"],
            tuple(sorted(one["constants"].items())),
            tuple(one["absent"]),
            tuple(one["divisible"]),
            one["warps"],
        )
        for one in json.loads(file.read_text())
    ]


def add_to(file: Path, forms: Iterable[Form]) -> None:
    """Add forms to a file."""
    every = sorted({*read(file), *forms})
    rows = [json.dumps({**asdict(one), "constants": one.values}) for one in every]
    file.write_text("[\n" + ",\n".join(rows) + "\n]\n")
