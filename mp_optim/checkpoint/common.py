"""Data of a version that is not in the tensors' files: param groups, scheduler, ``extra``. The file
is ``common.json``.

JSON has lists, text, numbers, and objects with keys of text. Any other value is written as an
object with one key: "$" and the name of the value's kind.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.checkpoint.file_format import Files, byte_view, dtype_named, read_checked
from mp_optim.config.setting_checks import plain_setting

COMMON = "common.json"
_PARTS = {"optimizer", "extra", "model", "scheduler"}
_SAME_IN_JSON = (type(None), bool, int, float, str)


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [[key, item] for key, item in value.items()]


def _text(value: bytes | bytearray | memoryview) -> str:
    return b64encode(value).decode()


def _of_tensor(value: Tensor) -> list[Any]:
    host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return [str(host.dtype).removeprefix("torch."), list(host.shape), _text(byte_view(host))]


def _tensor(parts: list[Any]) -> Tensor:
    name, shape, text = parts
    dtype, elements = dtype_named(name), bytearray(b64decode(text, validate=True))
    if len(elements) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {dtype} and shape {shape} cannot have {len(elements)} bytes")
    if not elements:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(elements, dtype=dtype).view(shape)


_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    dict: ("$dict", _pairs, dict),
    OrderedDict: ("$ordered", _pairs, OrderedDict),
    Counter: ("$counter", _pairs, lambda pairs: Counter(dict(pairs))),
    tuple: ("$tuple", list, tuple),
    set: ("$set", list, set),
    torch.Size: ("$size", list, torch.Size),
    bytes: ("$bytes", _text, b64decode),
    bytearray: ("$bytearray", _text, lambda text: bytearray(b64decode(text))),
    complex: ("$complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    torch.dtype: ("$dtype", lambda dtype: str(dtype).removeprefix("torch."), dtype_named),
    torch.device: ("$device", str, torch.device),
    Tensor: ("$tensor", _of_tensor, _tensor),
    nn.Parameter: ("$tensor", _of_tensor, _tensor),
}
"""For each type: the name of the type in the file, a function that converts a value to a value that
JSON can hold, and the inverse function."""
_RESTORED = {name: restore for name, _, restore in _KINDS.values()}


def as_json(common: Mapping[str, Any]) -> bytes:
    """Return the content of ``common.json``.

    Raises:
        ValueError: a value is not plain data; the message names the value's type.
    """
    refused: set[str] = set()
    try:
        plain = _plain(dict(common), refused)
    except RecursionError:
        refused.add("containers that hold themselves")
    if refused:
        raise ValueError(
            "extra, the scheduler's state, or the model's state dict has objects that a "
            f"checkpoint cannot store: {sorted(refused)}; save only numbers, strings, tensors and "
            "containers of them"
        )
    return json.dumps(plain).encode()


def _plain(value: Any, refused: set[str]) -> Any:
    """Return ``value`` as a value that JSON can hold. If its type is not supported, add the type's
    name to ``refused``."""
    if not isinstance(value, Tensor) and getattr(value, "ndim", 1) == 0:
        # Schedulers store numpy numbers in their state, and JSON cannot hold such numbers.
        value = plain_setting(value)
    kind = type(value)
    if kind in _SAME_IN_JSON:
        return value
    if kind is list:
        return [_plain(item, refused) for item in value]
    if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: _plain(item, refused) for key, item in value.items()}
    is_strided = not isinstance(value, Tensor) or (
        value.layout == torch.strided and not value.is_quantized and not value.is_meta
    )
    if kind not in _KINDS or not is_strided:
        refused.add(f"{kind.__module__}.{kind.__qualname__}")
        return None
    name, convert, _ = _KINDS[kind]
    return {name: _plain(convert(value), refused)}


def from_json(content: bytes) -> Any:
    """Return the data from the content of ``common.json``. No function that the content names is
    called.

    Raises:
        Exception: the content is damaged, or :func:`as_json` did not write it.
    """

    def restored(value: dict[str, Any]) -> Any:
        name = next(iter(value), "")
        return _RESTORED[name](value[name]) if name.startswith("$") else value

    return json.loads(content, object_hook=restored)


def read_common(version: Path, files: Files) -> dict[str, Any]:
    """Return the plain data of a version (param groups, loss scale, scheduler, ``extra``), after
    checks.

    Raises:
        ValueError: the file is damaged, or has other objects than plain data.
    """
    content = read_checked(version, files, COMMON)
    try:
        common: dict[str, Any] = from_json(content)
        if not isinstance(common, dict) or not common.keys() >= _PARTS:
            raise ValueError(f"the file does not have all of {sorted(_PARTS)}")
        if not isinstance(common["model"], dict):
            raise ValueError(f"'model' is a {type(common['model']).__name__} instead of a dict")
        for group in (common["optimizer"] or {"param_groups": ()})["param_groups"]:
            if len(group["params"]) != len(set(group["param_names"])):
                raise ValueError("a param group does not have one name for each parameter")
    except Exception as error:  # Parsing a damaged file can raise any error.
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{version / COMMON} is damaged or has objects other than plain data: "
            f"{type(error).__name__}: {first}; load another version"
        ) from error
    return common
