"""A pytest plugin that makes tests allocate on the simulated accelerator.

python -m pytest -p support.on_accelerator tests/unit/offload
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import is_hypothesis_test, settings
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import mp_optim
from mp_optim.host.transfer import Transfer
from mp_optim.offload.stepper import Stepper
from support.accelerator.simulation import KIND, Simulation
from support.accelerator.stand_in import simulated_accelerator
from support.models import AdversarialTransfer

_TORCH = str(Path(torch.__file__).parent)
_PRODUCT = (str(Path(mp_optim.__file__).parent), str(Path(torch.optim.__file__).parent))
_PASSED_OVER = (_TORCH, str(Path(__file__).parent / "accelerator"), __file__)
_DEVICE = torch.device(KIND, 1)
_OF_THE_HOST = (
    # these tests start a simulation of their own
    *("test_simulated_accelerator", "test_background_saves_of_devices"),
    # locks of the simulation do not survive a fork; these tests name their devices
    *("test_fork", "test_conformance"),
    *("test_native", "test_guards", "test_kernel_fit"),
    *("test_sanitizers", "test_self_test", "test_host_threads"),
    *("test_selection", "test_triton"),
    # these tests call kernels of the host or of the interpreter directly
    "test_native_cautious_decay_matches_the_reference_bits",
    "test_audit_repeats_triton_launches_with_host_kernels",
    # these tests read host addresses, tensors without memory, or a tensor subclass
    "test_state_of_many_tensors_shares_one_allocation_without_changing_bits",
    # FSDP2 frees storage that the simulation still writes to, which ends the process
    "test_offload_modes_give_equal_bits_when_fsdp_gradients_are_clipped_outside",
)
"""Modules and tests that stay on the host; most call host kernels directly."""
_WRITES_MEANWHILE = ("test_offload_modes_give_equal_bits_after_random_events_before_the_step",)
"""Tests that write state (by hand, load or reload) while a speculative step reads the state. The
step is dropped then, and the test compares bits."""
_AHEAD = re.compile(r"read by mp_step on thread \d+ \(mp_optim-host\)")
_EXAMPLES = 4
_ENDED: dict[str, str] = {}


class _MadeThere(TorchFunctionMode):
    """Makes factory calls from outside the package return tensors on the device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and _by_a_test():
            kwargs = {**kwargs, "device": _DEVICE}
        return func(*args, **kwargs)


def _by_a_test() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PRODUCT) or not file.startswith(_PASSED_OVER):
            break
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(_PRODUCT)


def _without_stand_ins(original: Callable[..., None]) -> Callable[..., None]:
    def use_transfer(stepper: Stepper, transfer: Transfer, bucket_bytes: int | None = None) -> None:
        if type(transfer) is Transfer:
            pytest.skip("it is about a model in host memory")
        if type(transfer) is not AdversarialTransfer or "empty_host" in vars(transfer):
            pytest.skip("it counts what a transfer of its own does")
        original(stepper, stepper.settings.transfer, bucket_bytes)

    return use_transfer


def _waits(simulation: Simulation, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        simulation.synchronize()
        return original(*args, **kwargs)

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test = getattr(item, "obj", None)
        if is_hypothesis_test(test):
            few = min(_EXAMPLES, test._hypothesis_internal_use_settings.max_examples)
            test._hypothesis_internal_use_settings = settings(
                test._hypothesis_internal_use_settings, max_examples=few, deadline=None
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if not {item.path.stem, getattr(item, "originalname", None)}.isdisjoint(_OF_THE_HOST):
        return (yield)
    with ExitStack() as context:
        simulation = context.enter_context(simulated_accelerator())
        for owner, name in ((Tensor, "numpy"), (torch, "save")):
            patched = _waits(simulation, getattr(owner, name))
            context.enter_context(mock.patch.object(owner, name, patched))
        patched = _without_stand_ins(Stepper.use_transfer)
        context.enter_context(mock.patch.object(Stepper, "use_transfer", patched))
        context.enter_context(_MadeThere())
        try:
            result = yield
        finally:
            touched = any(region.device is not None for region in simulation.memory)
            _ENDED[item.nodeid] = "touched" if touched else "untouched"
    writes = getattr(item, "originalname", None) in _WRITES_MEANWHILE
    problems = [each for each in simulation.reports if not (writes and _AHEAD.search(each))]
    if problems:
        pytest.fail("; ".join(problems))
    return result


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = os.environ.get("MP_OPTIM_REPORT")
    if file and report.when == "call" and (touched := _ENDED.get(report.nodeid)):
        errors = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
        with Path(file).open("a") as out:
            print(report.outcome, touched, report.nodeid, *errors[:1], sep="\t", file=out)
