"""From a YAML file and the command line to a `TrainConfig`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from training.config import TrainConfig

T = TypeVar("T")


def config_from_mapping(values: Mapping[str, Any], base: T, path: str = "") -> T:
    fields = {
        field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init
    }  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.0)
            raise ValueError(
                f"unknown key {path + str(key)!r}: the nearest field is {path + near[0]!r}"
            )
        current = fields[key]
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ValueError(f"{path + key!r} needs a mapping of fields, not {value!r}")
            changes[key] = config_from_mapping(value, current, f"{path}{key}.")
        else:
            changes[key] = _like(current, value, path + key)
            _check_choice(base, key, changes[key], path + key)
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def _check_choice(base: object, key: str, value: Any, name: str) -> None:
    hint = get_type_hints(type(base)).get(key)
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"{name}={value!r}: must be one of {list(get_args(hint))}")
    if hint is int and not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: must be a whole number")


def _like(current: object, value: Any, name: str) -> Any:
    if isinstance(current, torch.dtype) and isinstance(value, str):
        return value  # OptimizerConfig reads names of dtypes
    if isinstance(value, str) and not isinstance(current, str):
        try:
            return float(value)  # YAML 1.1 reads `1e-3` as a string
        except ValueError:
            if isinstance(current, (bool, int, float)):
                raise ValueError(
                    f"{name!r} needs a {type(current).__name__}, not {value!r}"
                ) from None
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def load_yaml(path: str | Path, base: TrainConfig | None = None) -> TrainConfig:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{line}not valid YAML: {error.problem or error.context}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: the top level has to be a mapping of sections")
    return config_from_mapping(values, base if base is not None else TrainConfig())


def parse_command_line(arguments: Sequence[str] | None = None) -> TrainConfig:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    known, rest = parser.parse_known_args(arguments)
    try:
        default = load_yaml(known.config) if known.config else TrainConfig()
    except (OSError, ValueError) as error:
        sys.exit(f"{known.config}: {error}")
    description = (
        f"{TrainConfig.__doc__}\n\n"
        "--config FILE reads defaults from a YAML file, e.g. tools/configs/quickstart.yaml."
    )
    try:
        return tyro.cli(
            TrainConfig, args=rest, default=default, description=description, registry=_registry()
        )
    except ValueError as error:
        sys.exit(str(error))


def _registry() -> ConstructorRegistry:
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def dtype_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[torch.dtype] | None:
        if info.type is not torch.dtype:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="DTYPE",
            instance_from_str=lambda words: _dtype(words[0]),
            is_instance=lambda value: isinstance(value, torch.dtype),
            str_from_instance=lambda dtype: [str(dtype).removeprefix("torch.")],
        )

    return registry


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype, such as bfloat16")
    return found
