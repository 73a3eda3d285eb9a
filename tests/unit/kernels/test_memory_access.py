"""How the kernels read and write memory changes their time, never a bit."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_optim.core import Slot, SlotUpdate, SlotUpdates
from mp_optim.kernels import native
from mp_optim.kernels.checksums import global_grad_norm
from mp_optim.kernels.native import MemoryAccess, get_access, set_access
from mp_optim.kernels.native_library import NativeLibrary, native_library
from mp_optim.rules.rule_optimizer import RuleOptimizer

RULES = {name: partial(RuleOptimizer, name) for name in ("adam", "lamb", "lion", "sgd")}
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


def test_the_library_refuses_negative_distances(library: NativeLibrary) -> None:
    with pytest.raises(RuntimeError, match="mp_set_access"):
        set_access(library, MemoryAccess(prefetch=-1))


def test_backend_uses_the_row_of_the_table_when_the_make_is_known(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = MemoryAccess(prefetch=64, streaming=False)
    monkeypatch.setattr(native, "cpu_maker", lambda: "Maker")
    native.NativeBackend(library)
    assert native.describe_access() == f"{MemoryAccess()} (default for Maker with {library.level})"
    monkeypatch.setitem(native.KNOWN, ("Maker", library.level), known)
    native.NativeBackend(library)
    assert native.describe_access() == f"{known} (known for Maker with {library.level})"
