"""How the kernels go through memory changes their time, never a bit; who chooses it, and when."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.core import Slot, SlotUpdate, SlotUpdates
from mp_optim.kernels import native
from mp_optim.kernels.checksums import global_grad_norm
from mp_optim.kernels.native import (
    LARGE,
    AccessChoice,
    MemoryAccess,
    get_access,
    set_access,
    try_out,
)
from mp_optim.kernels.native_library import NativeLibrary, native_library
from mp_optim.rules.elementwise import FusedAdam, FusedLion, FusedSGD
from mp_optim.rules.whole_param import FusedLAMB
from support.launch import run_forked_program

RULES = {"adam": FusedAdam, "lamb": FusedLAMB, "lion": FusedLion, "sgd": FusedSGD}
ACCESSES = st.builds(
    MemoryAccess,
    prefetch=st.integers(0, 5000),
    streaming=st.booleans(),
    measure_prefetch=st.integers(0, 70_000),
)


@pytest.fixture
def library() -> Iterator[NativeLibrary]:
    """The kernels; their access is as before afterwards."""
    library = native_library()
    if library.handle is None:
        pytest.skip(library.why)
    before = get_access(library)
    yield library
    set_access(library, before)


def _stepped(rule: str, numel: int, seed: int) -> tuple[bytes, float]:
    """Bits after two steps from bf16 gradients to bf16 outputs, and the norm of the gradients."""
    generator = torch.Generator().manual_seed(seed)
    main = torch.randn(numel, generator=generator)
    grad = torch.randn(numel, generator=generator).bfloat16()
    output = main.bfloat16()
    optimizer = RULES[rule]([main], lr=0.01)
    updates = SlotUpdates.of([SlotUpdate(Slot(0, 0), grad, 0.5, output)])
    for _ in range(2):
        optimizer.step_slots(updates)
    norm = global_grad_norm(updates)
    return main.numpy().tobytes() + output.view(torch.int16).numpy().tobytes(), float(norm)


@settings(max_examples=25, deadline=None)
@given(
    access=ACCESSES,
    rule=st.sampled_from(sorted(RULES)),
    numel=st.sampled_from([1, 63, 1024, 70_001, (4 << 20) + 5]),
    seed=st.integers(0, 99),
)
def test_no_bit_depends_on_it(access: MemoryAccess, rule: str, numel: int, seed: int) -> None:
    library = native_library()
    if library.handle is None:
        pytest.skip(library.why)
    before = get_access(library)
    expected = _stepped(rule, numel, seed)
    try:
        set_access(library, access)
        assert get_access(library) == access
        assert _stepped(rule, numel, seed) == expected
    finally:
        set_access(library, before)


@given(ACCESSES)
def test_it_is_written_as_it_is_read(access: MemoryAccess) -> None:
    assert MemoryAccess.parse(str(access)) == access


@pytest.mark.parametrize("text", ["prefetch", "prefetch=-1", "stride=4", "prefetch=1,"])
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"MP_OPTIM_MEMORY_ACCESS=.*measure_prefetch=NUMBER"):
        MemoryAccess.parse(text)


def test_the_library_refuses_negative_distances(library: NativeLibrary) -> None:
    with pytest.raises(RuntimeError, match="mp_set_access"):
        set_access(library, MemoryAccess(prefetch=-1))


# -- the trial ------------------------------------------------------------------------------------


class _Machine:
    """A library whose calls take as long as a make of CPU is said to need."""

    def __init__(self, seconds: Any) -> None:
        self.handle, self.level, self.why = object(), "some", ""
        self.access = MemoryAccess()
        self.calls: list[str] = []
        self.now = 0.0
        self.seconds = seconds

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name == "mp_set_access":
            values = arguments[0]._obj
            self.access = MemoryAccess(
                values.prefetch, bool(values.streaming), values.measure_prefetch
            )
        elif name == "mp_access":
            values = arguments[0]._obj
            values.prefetch, values.streaming = (self.access.prefetch, self.access.streaming)
            values.measure_prefetch = self.access.measure_prefetch
        else:
            self.now += self.seconds(name, self.access)


def _with_clock(monkeypatch: pytest.MonkeyPatch, machine: _Machine) -> None:
    clock = SimpleNamespace(perf_counter=lambda: machine.now)
    monkeypatch.setattr(native, "time", clock)


def _zen(name: str, access: MemoryAccess) -> float:
    """A make that prefetches well by itself and has slow stores past the caches."""
    if name == "mp_measure":
        return 1.0 if access.measure_prefetch == 2048 else 1.1
    return 10.0 + (access.prefetch > 0) + 2 * access.streaming


def test_the_fastest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(_zen)
    _with_clock(monkeypatch, machine)
    found = try_out(machine, threads=2, numel=1000)  # type: ignore[arg-type]
    assert found == MemoryAccess(prefetch=0, streaming=False, measure_prefetch=2048)
    assert machine.access == MemoryAccess()


def test_the_default_stays_where_others_are_hardly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _Machine(lambda name, access: 1.0 + 1e-5 * access.prefetch)
    _with_clock(monkeypatch, machine)
    assert try_out(machine, threads=2, numel=1000) == MemoryAccess()  # type: ignore[arg-type]


def test_the_default_stays_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setenv(native.ACCESS_VARIABLE, "trial")
    choice = AccessChoice(_Machine(_zen))  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "zeros", no_memory)
    choice.settle(1)
    assert choice.is_settled
    assert "no memory" in choice.describe()


# -- the choice -----------------------------------------------------------------------------------


def test_a_known_make_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ACCESS_VARIABLE, raising=False)
    known = MemoryAccess(prefetch=64, streaming=False)
    monkeypatch.setattr(native, "cpu_maker", lambda: "Maker")
    monkeypatch.setitem(native.KNOWN, ("Maker", "some"), known)
    machine = _Machine(_zen)
    choice = AccessChoice(machine)  # type: ignore[arg-type]
    assert choice.is_settled
    assert machine.access == known
    assert choice.describe() == f"{known} (known for Maker with some)"


_FIRST_STEPS = f"""
import torch
from mp_optim import FusedAdam
from mp_optim.core import Slot, SlotUpdate, SlotUpdates
from mp_optim.kernels import native
from mp_optim.kernels.native import access_choice
native.cpu_maker = lambda: "Maker"
native.try_out = lambda library, threads: print("tried") or native.MemoryAccess(0)
for numel in (1000, {LARGE}, {LARGE}):
    print(numel)
    optimizer = FusedAdam([torch.zeros(numel)], lr=0.1)
    grad = torch.zeros(numel, dtype=torch.bfloat16)
    optimizer.step_slots(SlotUpdates.of([SlotUpdate(Slot(0, 0), grad, 1.0)]))
    print(access_choice().describe())
"""


def test_another_make_is_tried_once_at_the_first_large_step(library: NativeLibrary) -> None:
    default, chosen = MemoryAccess(), MemoryAccess(0)
    waiting = f"{default} (default; Maker with {library.level} is tried at the first step)"
    tried = f"{chosen} (tried on Maker)"
    expected = ["1000", waiting, str(LARGE), "tried", tried, str(LARGE), tried]
    assert run_forked_program("-c", _FIRST_STEPS).splitlines() == expected


@pytest.mark.parametrize("wanted", ["default", "prefetch=128,streaming=0"])
def test_the_variable_decides(wanted: str, library: NativeLibrary) -> None:
    program = "from mp_optim.kernels.native import access_choice as choice\n"
    program += "print(choice().describe())"
    said = run_forked_program("-c", program, MP_OPTIM_MEMORY_ACCESS=wanted)
    access = MemoryAccess() if wanted == "default" else MemoryAccess.parse(wanted)
    assert said.strip() == f"{access} (MP_OPTIM_MEMORY_ACCESS={wanted})"


def test_a_trial_of_the_real_kernels_leaves_all_as_it_was(library: NativeLibrary) -> None:
    before = get_access(library)
    started = time.monotonic()
    assert isinstance(try_out(library, threads=1, numel=1 << 16), MemoryAccess)
    assert get_access(library) == before
    assert time.monotonic() - started < 60
