"""Choice of the backend for a ``fused_backend`` and a device, with the reason.

Each backend is loaded and tested once per process and device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from mp_optim.config.rules import BACKENDS, CAPABILITIES, Capability
from mp_optim.core import ParamGroups, iter_slots
from mp_optim.host.accelerator import CUDA
from mp_optim.host.calls import warn
from mp_optim.kernels import multi_tensor
from mp_optim.kernels.multi_tensor import TorchBackend
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.native_library import ENVIRONMENT, native_library
from mp_optim.kernels.reference import Backend, ReferenceBackend
from mp_optim.kernels.self_test import SelfTest, prove

_SAME_BITS = "auto: the bits are the same in every place"
_BY_FORM = "each form of a kernel is compared with reference at its first use"
_ON_HOST = ("native", "torch", "reference")
_ON_ACCELERATOR = ("triton", "apex", "transformer_engine", "torch", "reference")


@dataclass(frozen=True)
class _Source:
    """Loader and devices of a backend.

    Attributes:
        load: function that returns the backend, or the reason why it is not available. A raised
            error counts as a reason.
        devices: function that returns the device types on which the kernels run; None for all
            types.
        missing: reason to report if a Python module is not installed, by the module's name.
        by_form: True if the backend compares each form of its kernels with ``reference`` at the
            form's first use, and uses ``reference`` for a form with other bits. A form is a kernel
            with its compile-time constants.
    """

    load: Callable[[], Backend | str]
    devices: Callable[[], tuple[str, ...]] | None = None
    missing: Mapping[str, str] | None = None
    by_form: bool = False


def _native() -> Backend | str:
    library = native_library()
    return library.why if library.handle is None else NativeBackend(library)


def _triton() -> Backend | str:
    backend: Backend | None
    backend, why = importlib.import_module("mp_optim.kernels.triton").triton_backend()
    return backend or str(why)


_SOURCES: dict[str, _Source] = {
    "native": _Source(_native, lambda: ("cpu",)),
    "reference": _Source(ReferenceBackend),
    "torch": _Source(TorchBackend),
    "triton": _Source(
        _triton,
        lambda: ("cpu",) if os.environ.get("TRITON_INTERPRET") == "1" else (CUDA.type,),
        by_form=True,
    ),
    "apex": _Source(
        lambda: multi_tensor.ApexBackend(importlib.import_module("amp_C")),
        lambda: (multi_tensor.KERNEL_DEVICE,),
        {
            "amp_C": (
                "NVIDIA apex with its CUDA extensions is not installed "
                "(apex on PyPI is another project)"
            )
        },
    ),
    "transformer_engine": _Source(
        multi_tensor.load_transformer_engine,
        lambda: (multi_tensor.KERNEL_DEVICE,),
        {
            "transformer_engine": "Transformer Engine is not installed",
            "transformer_engine_torch": (
                "Transformer Engine is installed without its PyTorch extension"
            ),
        },
    ),
}
assert set(BACKENDS) == {"auto", *_SOURCES}


def candidates(device: torch.device) -> tuple[str, ...]:
    """Return the names of the backends that ``auto`` tries for a device, in order."""
    return _ON_HOST if device.type == "cpu" else _ON_ACCELERATOR


def forget() -> None:
    """Delete all results of self-tests.

    Call this function after a library was installed in a running process. The next call of
    :func:`choose_backend` then finds the library.
    """
    _proven.cache_clear()
    choose_backend.cache_clear()


def proof_of(name: str, device: torch.device, by_form: bool = True) -> SelfTest:
    """Return the self-test of a backend on a device. The first call loads and tests the backend.

    Args:
        name: name of the backend.
        device: device of the step.
        by_form: True to report kernels as exact without a test if each form is compared at its
            first use; False to test such kernels now.
    """
    return _proven(name, device, by_form)[1]


@cache
def _proven(name: str, device: torch.device, by_form: bool) -> tuple[Backend, SelfTest]:
    """Return a backend and its self-test; ``reference`` in place of a backend that is not
    available."""
    source, backend = _SOURCES[name], _loaded(name, device)
    if isinstance(backend, str):
        return ReferenceBackend(), SelfTest(name, str(device), False, False, backend)
    if source.by_form and by_form:
        backend.prove_at_first_use()
        return backend, SelfTest(name, str(device), True, True, _BY_FORM)
    return backend, prove(backend, device)


def _loaded(name: str, device: torch.device) -> Backend | str:
    """Return a backend, or the reason why it is not available for a device."""
    source = _SOURCES[name]
    try:
        backend = source.load()
    except Exception as error:
        absent = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        if source.missing and absent in source.missing:
            return source.missing[absent]
        return f"cannot be loaded: {type(error).__name__}: {str(error).strip() or 'no message'}"
    if isinstance(backend, str) or source.devices is None or device.type in source.devices():
        return backend
    is_missing = device.type == "cpu" and not CUDA.is_available()
    none = "; torch finds no CUDA device" if is_missing else ""
    places = " and ".join(source.devices())
    return f"its kernels run on {places}, not on {device.type}{none}"


@cache
def choose_backend(name: str, device: torch.device, rule: str = "") -> tuple[Backend, str]:
    """Return the backend for ``fused_backend=name`` on a device, and the reason.

    ``auto`` chooses the first of :func:`candidates` with the bits of ``reference``. Another backend
    is used on the device types on which its kernels run. On other device types, ``auto`` chooses.

    Args:
        name: value of ``fused_backend``.
        device: device of the tensors.
        rule: name of a rule. If the chosen backend has no kernels for the rule, ``reference`` is
            returned.

    Raises:
        ValueError: the name is unknown, or the backend is not usable.
    """
    if rule:
        backend, why = choose_backend(name, device)
        if rule in CAPABILITIES.get(backend.name, Capability()).rules:
            return backend, why
        reason = f"{why}; {backend.name} has no kernels for {rule}"
        return choose_backend("reference", device)[0], reason
    if name == "auto":
        return _auto(device)
    if name not in _SOURCES:
        raise ValueError(f"fused_backend={name!r} is not available; choose from {list(BACKENDS)}")
    where, devices = device, _SOURCES[name].devices
    if devices is not None and device.type not in devices():
        # Test the backend where it runs: on the host or the current GPU. Without a GPU, the test on
        # the given device fails, and its result has the reason for the error below.
        host = torch.device("cpu")
        where = host if devices() == ("cpu",) else CUDA.current() if CUDA.is_available() else device
    backend, proof = _proven(name, where, True)
    if not proof.usable:
        raise ValueError(f"fused_backend={name!r} is not available: {proof.reason}; choose 'auto'")
    if where != device:
        other, _ = _auto(device)
        same = (
            "this has the same bits"
            if proof.exact
            else f"{name} has other bits, so placement shows in the results"
        )
        return other, f"{name} kernels run on {where.type}; {same}"
    limits = backend.limits
    return backend, "; ".join(
        filter(None, (f"fused_backend={name!r}", "" if proof.exact else proof.reason, limits))
    )


def _auto(device: torch.device) -> tuple[Backend, str]:
    passed_over: list[str] = []
    for name in candidates(device):
        backend, proof = _proven(name, device, True)
        if proof.usable and proof.exact:
            if isinstance(backend, NativeBackend):
                return backend, f"{_SAME_BITS}; {backend.library.level}"
            return backend, "; ".join([_SAME_BITS, *passed_over])
        use = f" (choose fused_backend={name!r} to use it)" if proof.usable else ""
        missing = "no native kernels: " if name == "native" else f"not {name}: "
        passed_over.append(f"{missing}{proof.reason}{use}")
    if device.type == CUDA.type and CUDA.is_available():
        warn(
            f"fused_backend='auto': no kernels for {device} have the bits of the host's kernels "
            f"({'; '.join(passed_over)}), so steps on {device} run torch's operations, one pass "
            "over memory for each; set fused_backend='reference' to accept such steps without this "
            "warning"
        )
    return ReferenceBackend(), "; ".join([_SAME_BITS, *passed_over])


def check_serves(name: str, device: torch.device) -> None:
    """Raise if a named backend has no kernels for the device of the parameters.

    Raises:
        ValueError: the backend has no such kernels. The message names the backend and the device.
    """
    if name in _SOURCES:
        devices = _SOURCES[name].devices
        if name != "native" and devices is not None and device.type not in (*devices(), "meta"):
            # If the backend is not usable at all, choose_backend() raises a clearer error.
            choose_backend(name, device)
            raise ValueError(
                f"fused_backend={name!r}: the model's parameters are on {device.type}, but the "
                f"backend's kernels run on {' and '.join(devices())}; move the model, or choose "
                "'auto'"
            )


_HOST = torch.device("cpu")


def warn_of_missing_kernels(fused_backend: str, rule: str, groups: ParamGroups) -> None:
    """Warn once per process if native kernels are missing for groups that are stepped on the host.

    Does not warn if ``fused_backend`` or the environment selects another backend.

    Args:
        fused_backend: ``fused_backend`` of the config.
        rule: name of the rule that steps the groups.
        groups: param groups.
    """
    if not any(param.is_cpu for _, param in iter_slots(groups)):
        return
    chosen = choose_backend(fused_backend, _HOST)[0].name
    is_asked_for = chosen == fused_backend or os.environ.get(ENVIRONMENT) == "off"
    has_kernels = rule in CAPABILITIES["native"].rules
    if chosen != "native" and has_kernels and not is_asked_for:
        _warn_once(proof_of("native", _HOST).reason)


@cache
def _warn_once(reason: str) -> None:
    warn(
        f"native kernels are missing ({reason}), so steps on the host take about 11 times as "
        "long, with the same bits. On a CPU with AVX2, AVX-512 or NEON, install a wheel of "
        "mp_optim, or install it again with a C++ compiler (g++ or clang++). "
        f"{ENVIRONMENT}=off turns this warning off"
    )
