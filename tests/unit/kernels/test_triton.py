"""Launch, choice and compilation of Triton's kernels."""

import math
import os
import re
import sys
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from mp_optim.kernels.kernel_args import LambScalars, TensorLists
from mp_optim.kernels.triton import triton_backend
from mp_optim.kernels.triton.backend import TritonBackend
from support import kernel_bits, tritons
from support.kernel_bits import REFERENCE, SIZES, assert_same, assert_same_lists
from support.kernel_cases import GROUP, KEYS, Case, lists_of, step_with
from support.launch import PATH, run, run_forked_program

FOUND, WHY = triton_backend()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.skipif(FOUND is None, reason=f"no Triton kernels: {WHY}"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # numpy warns of overflow and NaN in Triton's interpreter.


@pytest.fixture(autouse=True)
def no_tables_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FOUND", TritonBackend())


def kernels() -> Any:
    assert FOUND is not None
    return FOUND


def on_device(lists: TensorLists) -> TensorLists:
    return kernel_bits.on_device(lists, DEVICE)


def check(rule: str, sizes: list[int], case: Case, **settings: Any) -> None:
    kernel_bits.check(kernels(), rule, sizes, case, device=DEVICE, **settings)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, no_tables_yet: None) -> None:
    monkeypatch.setattr("mp_optim.kernels.triton.backend.CHUNK", 2048)
    monkeypatch.setattr("mp_optim.kernels.triton.launches.SUM_CHUNK", 1024)
    monkeypatch.setattr("mp_optim.kernels.triton.launches.RUN", 4)
    monkeypatch.setattr("mp_optim.kernels.triton.tables.RUN", 4)


def test_triton_sums_equal_reference_when_a_sum_takes_several_rounds(small_chunks):
    sizes = [0, 1024 * 4, 1024 * 16 + 1, 18_000, 5]
    grads = lists_of(5, sizes, (), Case(torch.float32)).grad
    ours = [grad.to(DEVICE) for grad in grads]
    assert_same(kernels().sum_of_squares(ours), REFERENCE.sum_of_squares(grads), "sums")
    check("lamb", sizes, Case())


@pytest.mark.skipif(DEVICE != "cpu", reason="the tables of this test are made by hand, on the CPU")
def test_triton_sum_reads_elements_past_32_bit_indices():
    from mp_optim.kernels.triton.kernels import sums

    # untouched pages take no memory
    big = torch.from_numpy(np.zeros(2**32 + 9000, np.int16)).view(torch.bfloat16)
    big[-1], big[2**32 - 16384] = 3.0, 5.0
    owners = torch.zeros(2, dtype=torch.int32)
    first = torch.tensor([-(2**32 // 16384 - 1)], dtype=torch.int32)
    found = torch.empty(2, dtype=torch.float64)
    address = torch.tensor([big.data_ptr()])
    sums.chunk_sums[(2,)](
        owners,
        first,
        torch.tensor([len(big)]),
        address,
        found,
        TYPE=sums.tl.bfloat16,
        ALIGNED=True,
        CHUNK=16384,
    )
    assert found.tolist() == [25.0, 9.0]


@pytest.mark.parametrize("rule", list(KEYS))
def test_triton_step_writes_nothing_when_the_skip_flag_on_the_device_is_set(rule):
    case = Case(rest=torch.int16, moments=(torch.int8, torch.bfloat16))
    ours, theirs = (on_device(lists_of(1, [2500, 7], KEYS[rule], case)) for _ in range(2))
    skip = torch.tensor([0.37, 1.0], device=DEVICE)
    if rule == "lamb":
        scalars = LambScalars.at(GROUP, 2)
        assert not kernels().lamb_moments(ours, scalars, skip).any()
        kernels().lamb_apply(ours, scalars, torch.ones(2, device=DEVICE), skip=skip[1:])
    else:
        step_with(kernels(), rule.split()[-1], ours, GROUP, 2, skip)
    assert_same_lists(ours, theirs)


def test_triton_lamb_apply_gives_equal_bits_for_trust_ratios_on_device_and_host():
    ours, theirs = (on_device(lists_of(1, [2500, 7, 9], KEYS["lamb"], Case())) for _ in range(2))
    scalars, ratios = LambScalars.at(GROUP, 2), [0.5, 0.25, 0.125]
    for lists in (ours, theirs):
        # Outputs have two dtypes.
        lists.output[1] = torch.zeros(7, dtype=torch.float16, device=DEVICE)
    kernels().lamb_apply(ours, scalars, torch.tensor(ratios, device=DEVICE))
    kernels().lamb_apply(theirs, scalars, ratios)
    assert_same_lists(ours, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_triton_lamb_computes_trust_ratios_on_the_device_with_host_bits(decay):
    sizes, group = [2500, 7, 0, 300, 9], {**GROUP, "weight_decay": decay, "lr": 0.1}
    ours, theirs = (lists_of(1, sizes, KEYS["lamb"], Case()) for _ in range(2))
    for lists in (ours, theirs):
        lists.main[1].zero_()
        for tensor in (lists.main[3], lists.grad[3], lists.state["exp_avg"][3]):
            tensor.zero_()
        lists.grad[4][0] = math.inf
    ours, scalars = on_device(ours), LambScalars.at(group, 2)
    kernels().lamb(ours, scalars, torch.tensor([0.375, 0.0], device=DEVICE))
    sums = REFERENCE.lamb_moments(theirs, scalars, 0.375)
    ratios = [
        0.1 * math.sqrt(p) / math.sqrt(u) if scalars.adapts and p and u else 0.1
        for p, u in sums.tolist()
    ]
    REFERENCE.lamb_apply(
        theirs, scalars, torch.tensor(ratios, dtype=torch.float64).float().tolist()
    )
    assert_same_lists(ours, theirs)
    before = deepcopy(ours)
    kernels().lamb(ours, scalars, torch.tensor([0.375, 1.0], device=DEVICE))
    assert_same_lists(ours, before)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    from mp_optim.kernels.triton.kernels import sums, tiles

    counted: list[tuple[int, bool]] = []

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, ALIGNED: bool, **named: Any) -> None:
                counted.append((grid[0], ALIGNED))
                self.kernel[grid](*arguments, ALIGNED=ALIGNED, **named)

            return launch

    monkeypatch.setattr(tiles, "step", Counted(tiles.step))
    monkeypatch.setattr(sums, "chunk_sums", Counted(sums.chunk_sums))
    return counted


def test_triton_launches_once_for_any_number_of_tensors(launched):
    check("adam", [300] * 40 + [9000], Case(aligned=True))
    assert launched == [(42, True)]


def with_one_odd(lists: TensorLists, column: str, place: int) -> TensorLists:
    tensors = lists.state.get(column) or getattr(lists, column)
    odd = tensors[place]
    tensors[place] = torch.empty(odd.numel() + 1, dtype=odd.dtype)[1:].copy_(odd)
    return lists


@pytest.mark.parametrize("rule", ["adam", "lamb"])
@pytest.mark.parametrize("column", ["grad", "main", "exp_avg", "exp_avg_sq", "output"])
def test_triton_launches_unaligned_tensors_separately(launched, column, rule):
    sizes, case = [300, 9000, 0, 8192, 5], Case(aligned=True)
    ours, theirs = (lists_of(1, sizes, KEYS[rule], case) for _ in range(2))
    ours = on_device(with_one_odd(ours, column, 1))
    found = step_with(kernels(), rule, ours, GROUP, 2, 0.375)
    expected = step_with(REFERENCE, rule, theirs, GROUP, 2, 0.375)
    assert_same_lists(ours, theirs)
    each = [(3, True), (2, False)]
    if rule == "lamb":
        assert_same(found, expected, "sums")
        each = [(5, True), *each] if column == "output" else each * 2
    assert launched == each


@pytest.mark.gpu
def test_triton_step_does_not_synchronize_and_refuses_graph_capture():
    control = torch.tensor([0.37, 0.0], device=DEVICE)
    case = Case(rest=torch.int8, moments=(torch.int8, torch.uint8))
    ours, theirs = (on_device(lists_of(1, SIZES, KEYS["adam"], case)) for _ in range(2))
    for lists in (ours, theirs):
        step_with(kernels(), "adam", lists, GROUP, 1, control)
        kernels().sum_of_squares(lists.grad)

    def step() -> None:
        step_with(kernels(), "adam", ours, GROUP, 2, control)

    with (
        pytest.raises(RuntimeError, match="after the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        step()
    torch.cuda.set_sync_debug_mode("error")
    step()
    sums = kernels().sum_of_squares(ours.grad)
    step_with(kernels(), "adam", theirs, GROUP, 2, control)
    torch.cuda.set_sync_debug_mode("default")
    assert_same_lists(ours, theirs)
    assert_same(sums.cpu(), kernels().sum_of_squares(theirs.grad).cpu(), "sums")


def test_triton_step_refuses_graph_capture_and_writes_nothing(monkeypatch):
    lists = on_device(lists_of(1, SIZES, KEYS["adam"], Case()))
    step_with(kernels(), "adam", lists, GROUP, 1, 0.37)
    before = [tensor.clone() for tensor in lists.main]
    monkeypatch.setattr("mp_optim.kernels.triton.tables.is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"a CUDA graph is captured: .*after the capture"):
        step_with(kernels(), "adam", lists, GROUP, 2, 0.37)
    assert all(map(torch.equal, lists.main, before))


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("", "torch sees no GPU"),
        ("broken", "OSError: cannot load"),
        ("old", "Triton 3.5.1 flushes denormals to 0"),
    ],
)
def test_auto_chooses_a_host_backend_when_triton_is_unusable(trouble, said, tmp_path):
    (tmp_path / "triton.py").write_text("raise OSError('cannot load')")
    path = [str(tmp_path)] if trouble == "broken" else []
    program = (
        "import torch; from mp_optim.kernels import choose_backend as choose\n"
        "print(choose('auto', torch.device('cpu'))[0].name)\n"
        f"torch.cuda.is_available = lambda: {trouble == 'old'}\n"
        f"if {trouble == 'old'}: import triton; triton.__version__ = '3.5.1'\n"
        "from mp_optim.kernels.triton import triton_backend; print(triton_backend()[1])"
    )
    path = os.pathsep.join([*path, PATH])
    # The forking server has imported the real Triton already.
    begun = run if trouble == "broken" else run_forked_program
    said_by_it = begun("-c", program, TRITON_INTERPRET="0", PYTHONPATH=path)
    auto, triton = said_by_it.splitlines()
    assert auto in ("native", "reference")
    assert said in triton


WIDE = r"{}\.global[\w.:]*\.(?:v4\.[bfu]32|v2\.[bfu]64)"
HALF = r"{}\.global[\w.:]*\.v2\.[bfu]32"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the PTX of each kernel for sm_90, in one or two forms."""
    return tritons.compiled(None, "90", tmp_path_factory.mktemp("triton"))


def test_triton_compiles_each_kernel_once_for_any_scalars(compiled):
    check_whole(compiled)


def check_whole(compiled: dict[str, dict[str, Any]]) -> None:
    assert {label: len(variant["ptx"]) for label, variant in compiled.items()} == dict.fromkeys(
        compiled, 1
    )
    assert {variant["kernel"] for variant in compiled.values()} == {
        "adam",
        "sgd",
        "lion",
        "lamb_moments",
        "lamb_apply",
        "muon_momentum",
        "muon_apply",
        "chunk_sums",
        "run_sums",
    }


def test_triton_kernels_have_no_contraction_flush_or_approximation_in_ptx(compiled):
    check_exact(compiled)


def check_exact(compiled: dict[str, dict[str, Any]]) -> None:
    for label, variant in compiled.items():
        ptx = variant["ptx"][0]
        inexact = sorted(set(tritons.INEXACT.findall(ptx)))
        assert not inexact, f"{label}: {inexact}"
        if variant["kernel"] in ROOTED:
            assert "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx, label


def test_triton_kernels_access_aligned_tensors_16_bytes_at_a_time(compiled):
    """The number of wide accesses equals the bytes of a thread's unmasked path divided by 16."""
    for label, variant in compiled.items():
        counts = {}
        for verb in ("ld", "st"):
            ptx = variant["ptx"][0]
            counts[verb] = len(re.findall(WIDE.format(verb), ptx))
            counts[f"{verb} half"] = len(re.findall(HALF.format(verb), ptx))
        assert counts == variant["wide"], label


ROOTED = ("adam", "lamb_moments", "lamb_apply")
"""Kernels that divide by a square root."""
REGISTERS = 65536
"""Registers of one multiprocessor of sm_90, allocated to a warp in steps of 8 per thread."""


def held_warps(variant: dict[str, Any]) -> int:
    threads, registers = 32 * variant["warps"], -(-variant["used"]["REG"] // 8) * 8
    return int(REGISTERS // (registers * threads) * variant["warps"])


def test_triton_kernels_allow_16_warps_and_spill_no_registers(compiled):
    """With more resident warps, a step waits less for memory. Only two kinds of kernels may allow
    fewer than 16 warps: sums 12, because they issue all loads at once, and 4-bit codes at unaligned
    addresses 8, because they are rare. Two packed predicates take 8 bytes of stack."""
    held = {}
    for label, variant in compiled.items():
        assert variant["used"]["LOCAL"] == 0 and variant["used"]["STACK"] <= 8, label
        least = 12 if variant["kernel"] == "chunk_sums" else 16
        if "uint8" in label and "anywhere" in label:
            least = 8
        held[label] = (held_warps(variant) >= least, variant["used"]["REG"])
    assert all(enough for enough, _ in held.values()), held


@pytest.mark.slow
@pytest.mark.skipif(
    not tritons.folder_of(tritons.OLDEST).is_dir(),
    reason=f"not compiled by Triton {tritons.OLDEST}, the oldest supported: "
    f"PYTHONPATH=tests python -m support.tritons --fetch {tritons.OLDEST}",
)
def test_oldest_supported_triton_compiles_every_kernel(tmp_path):
    """Users have the Triton version of their torch. The newest Triton accepts code that older
    versions refuse, and its assembler uses more registers."""
    compiled = tritons.compiled(tritons.OLDEST, "90", tmp_path)
    check_whole(compiled)
    check_exact(compiled)
    for label, variant in compiled.items():
        assert variant["used"]["LOCAL"] == 0 and held_warps(variant) >= 8, label
