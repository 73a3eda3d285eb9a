"""How the machine carries out kernels: threads that part and meet, memory and its guards, and what
it refuses. The kernels are written here, in PTX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx.machine import DivergedError, InexactError, execute
from ptx.memory import GlobalMemory, MisalignedError, OutOfBoundsError, Piece, RaceError
from ptx.parser import Immediate, PtxError, Register, operand, parse

KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry tried(
	.param .u64 .ptr .global .align 1 tried_param_0,
	.param .u64 .ptr .global .align 1 tried_param_1,
	.param .u32 tried_param_2
)
.reqntid {threads}
{{
	{local}
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<40>;
	.reg .b64 	%rd<40>;
	.reg .b64 	%SP;
	ld.param.b64 	%rd1, [tried_param_0];
	ld.param.b64 	%rd2, [tried_param_1];
	ld.param.b32 	%r1, [tried_param_2];
	mov.u32 	%r2, %tid.x;
	mov.u32 	%r3, %ctaid.x;
	mad.lo.s32 	%r4, %r3, {threads}, %r2;  // this thread's number
	mul.wide.s32 	%rd3, %r4, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
{body}
	ret;
}}
"""
READ, WRITTEN = 0x10000, 0x50004000


def carried_out(
    body: str,
    given: Any = None,
    count: int = 64,
    blocks: int = 1,
    threads: int = 64,
    number: int = 0,
    local: str = "",
    shared: int = 1024,
) -> np.ndarray[Any, Any]:
    """What a kernel leaves in ``count`` numbers of its second tensor."""
    numbers = np.arange(64 * 4, dtype=np.uint32) if given is None else given
    result = np.zeros(count, np.uint32)
    memory = GlobalMemory(
        [Piece(READ, numbers.view(np.uint8)), Piece(WRITTEN, result.view(np.uint8))]
    )
    program = parse(KERNEL.format(body=body, threads=threads, local=local))
    execute(program, [READ, WRITTEN, number], blocks, threads, shared, memory)
    memory.give_back()
    return result


def test_every_thread_of_every_block_does_its_part() -> None:
    body = "ld.global.b32 %r5, [%rd4]; add.s32 %r5, %r5, 7; st.global.b32 [%rd5], %r5;"
    assert carried_out(body, count=256, blocks=4).tolist() == [n + 7 for n in range(256)]


def test_threads_part_at_a_branch_and_meet_again() -> None:
    body = """
	and.b32 %r5, %r2, 3;
	mov.b32 %r6, 0;
	setp.eq.s32 %p1, %r5, 0;
	@%p1 bra $L_after;
$L_loop:
	add.s32 %r6, %r6, 10;
	add.s32 %r5, %r5, -1;
	setp.ne.s32 %p2, %r5, 0;
	@%p2 bra $L_loop;
$L_after:
	bar.sync 0;
	add.s32 %r6, %r6, 1;
	st.global.b32 [%rd5], %r6;
"""
    assert carried_out(body).tolist() == [1, 11, 21, 31] * 16


def test_a_guard_keeps_threads_from_an_instruction() -> None:
    body = """
	setp.lt.s32 %p1, %r2, %r1;
	mov.b32 %r5, 3;
	@%p1 mov.b32 %r5, 4;
	@!%p1 st.global.b32 [%rd5], %r5;
"""
    assert carried_out(body, number=60).tolist() == [0] * 60 + [3] * 4


def test_several_numbers_are_read_packed_and_written_at_once() -> None:
    body = """
	mul.wide.s32 %rd6, %r4, 16;
	add.s64 %rd6, %rd1, %rd6;
	ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd6 + 0 ];
	mov.b64 %rd7, {%r5, %r8};
	mov.b64 {_, %r9}, %rd7;
	mov.b32 {%rs1, %rs2}, %r6;
	mov.b32 %r10, {%rs2, %rs1};
	shl.b64 %rd9, %rd3, 1;
	add.s64 %rd8, %rd2, %rd9;
	st.global.v2.b32 [%rd8], {%r9, %r10};
"""
    found = carried_out(body, count=128).reshape(64, 2).tolist()
    assert found == [[4 * n + 3, (4 * n + 1) << 16] for n in range(64)]


def test_lanes_exchange_values() -> None:
    body = """
	mov.b32 %r9, -1;
	shfl.sync.bfly.b32 %r5, %r4, 5, 31, -1;
	redux.sync.max.s32 %r6, %r4, %r9;
	shfl.sync.idx.b32 %r7, %r4, 3, 31, -1;
	mad.lo.s32 %r5, %r6, 1000, %r5;
	mad.lo.s32 %r5, %r7, 1000000, %r5;
	st.global.b32 [%rd5], %r5;
"""
    expected = [(n // 32 * 32 + 3) * 1000000 + (n | 31) * 1000 + (n ^ 5) for n in range(64)]
    assert carried_out(body).tolist() == expected


def test_packed_halves_are_compared_each_with_its_own() -> None:
    """1 where the lower halves compare so, and 2 where the upper ones do."""
    body = """
	mov.b32 %r6, {};
	setp.{}.f16x2 %p1|%p2, %r6, {};
	selp.b32 %r5, 1, 0, %p1;
	selp.b32 %r7, 2, 0, %p2;
	add.s32 %r5, %r5, %r7;
	st.global.b32 [%rd5], %r5;
"""
    nan_and_one, two_and_one = 0x7E003C00, 0x40003C00
    for how, first, second, expected in (
        ("nan", nan_and_one, two_and_one, 2),
        ("eq", two_and_one, nan_and_one, 1),
        ("gt", two_and_one, 0x3C003C00, 2),
    ):
        assert set(carried_out(body.format(first, how, second)).tolist()) == {expected}


SHARED = """
	shl.b32 %r5, %r2, 2;
	mov.b32 %r6, global_smem;
	add.s32 %r7, %r6, %r5;
	st.shared.b32 [%r7], %r4;
	{barrier}
	xor.b32 %r8, %r5, {other};
	ld.shared.b32 %r9, [%r8];
	st.global.b32 [%rd5], %r9;
"""


def test_a_block_has_memory_of_its_own() -> None:
    found = carried_out(SHARED.format(barrier="bar.sync 0;", other=128), count=128, blocks=2)
    assert found.tolist() == [n ^ 32 for n in range(128)]


def test_what_no_barrier_orders_is_a_race() -> None:
    with pytest.raises(RaceError, match="reads what another wrote"):
        carried_out(SHARED.format(barrier="", other=128))
    with pytest.raises(RaceError, match="reads what another wrote"):
        carried_out(SHARED.format(barrier="bar.warp.sync -1;", other=128))  # of another warp
    found = carried_out(SHARED.format(barrier="bar.warp.sync -1;", other=4))
    assert found.tolist() == [n ^ 1 for n in range(64)]


def test_two_threads_that_write_an_address_are_a_race() -> None:
    with pytest.raises(RaceError, match="writes what another writes"):
        carried_out("st.global.b32 [%rd2], %r3;")
    body = "setp.eq.s32 %p1, %r4, {}; @%p1 st.global.b32 [%rd2], %r3;"
    with pytest.raises(RaceError, match="writes what another wrote"):
        carried_out(body.format(0) + body.format(64), blocks=2)


def test_what_another_block_reads_must_not_be_written() -> None:
    body = """
	ld.global.b32 %r5, [%rd2];
	bar.sync 0;
	setp.eq.s32 %p1, %r4, 70;
	@%p1 st.global.b32 [%rd2], %r5;
"""
    with pytest.raises(RaceError, match="writes what another read"):
        carried_out(body, blocks=2)
    assert carried_out(body.replace("70", "7")).tolist() == [0] * 64  # one block, and a barrier


def test_an_access_outside_of_every_tensor_is_refused() -> None:
    with pytest.raises(OutOfBoundsError, match="near a tensor of 252 bytes"):
        carried_out("st.global.b32 [%rd5], %r4;", count=63)
    with pytest.raises(OutOfBoundsError):
        carried_out("ld.global.b32 %r5, [%rd4+-4]; st.global.b32 [%rd5], %r5;")
    with pytest.raises(OutOfBoundsError, match="its own memory"):
        carried_out(SHARED.format(barrier="", other=0), shared=252)


def test_a_wide_access_lies_at_a_multiple_of_its_width() -> None:
    with pytest.raises(MisalignedError, match="8 bytes"):
        carried_out("ld.global.v2.b32 {%r5, %r6}, [%rd4]; st.global.b32 [%rd5], %r5;")


def test_a_barrier_that_some_threads_miss_is_refused() -> None:
    with pytest.raises(DivergedError, match=r"bar\.sync"):
        carried_out("setp.lt.s32 %p1, %r2, 32; @%p1 bra $L_x; bar.sync 0;\n$L_x:")
    with pytest.raises(DivergedError, match=r"shfl\.sync"):
        carried_out("setp.lt.s32 %p1, %r2, 5; @%p1 shfl.sync.bfly.b32 %r5, %r4, 5, 31, -1;")


def test_an_approximation_is_refused_where_bits_are_promised() -> None:
    with pytest.raises(InexactError, match=r"div\.full\.f32"):
        carried_out("div.full.f32 %r5, %r4, %r4;")
    with pytest.raises(InexactError, match=r"add\.f32"):  # the assembler may contract it
        carried_out("add.f32 %r5, %r4, %r4;")


@pytest.mark.parametrize(
    "line",
    [
        "add.rn.ftz.f32 %r5, %r4, %r4;",
        "mul.rn.sat.f32 %r5, %r4, %r4;",
        "fma.rn.relu.f16 %r5, %r4, %r4, %r4;",
        "ld.global.L1::evict_last.b32 %r5, [%rd4];",
        "shfl.sync.up.b32 %r5, %r4, 5, 0, -1;",
        "bar.arrive 0, 32;",
        "add.s32 %r5, %r4;",
        "add.s32 %r5, %r4, %nothing;",
        "mul.wide.s32 %r5, %r4, %r4;",
        "add.s32 %r5, %r39, 1;",
    ],
)
def test_what_it_does_not_know_is_an_error(line: str) -> None:
    with pytest.raises(PtxError):
        carried_out(line)


def test_a_loop_without_an_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptx.machine.STEPS", 100)
    with pytest.raises(PtxError, match="no end in sight"):
        carried_out("$L_x:\nbra.uni $L_x;")


def test_a_thread_has_memory_of_its_own() -> None:
    body = """
	mov.b64 %rd6, depot;
	cvta.local.u64 %SP, %rd6;
	cvt.u16.u32 %rs1, %r4;
	st.b8 [%SP], %rs1;
	st.b8 [%SP+1], %rs1;
	ld.b16 %rs2, [%SP];
	cvt.u32.u16 %r5, %rs2;
	st.global.b32 [%rd5], %r5;
"""
    found = carried_out(body, local=".local .align 2 .b8 \tdepot[4];")
    assert found.tolist() == [n << 8 | n for n in range(64)]


def test_matrices_are_read_by_rows_that_lanes_point_at() -> None:
    """Lane 8 i + j points at row j of matrix i, and lane 4 r + c gets numbers 2 c and 2 c + 1 of
    row r of each."""
    body = """
	shl.b32 %r5, %r2, 4;
	st.shared.v4.b32 [%r5], {%r4, %r4, %r4, %r4};
	st.shared.b32 [%r5+4], %r3;
	bar.sync 0;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r5];
	mad.lo.s32 %r10, %r13, 100, %r10;
	st.global.b32 [%rd5], %r10;
"""
    found = carried_out(body, threads=32, count=32).tolist()
    rows = [lane // 4 for lane in range(32)]
    assert found == [
        0 if lane % 4 == 1 else (24 + row) * 100 + row for lane, row in enumerate(rows)
    ]


def test_addresses_far_beyond_32_bits_are_kept_apart() -> None:
    numbers = np.arange(64, dtype=np.uint32)
    result = np.zeros(64, np.uint32)
    far = (1 << 40) + 12
    memory = GlobalMemory([Piece(far, numbers.view(np.uint8)), Piece(256, result.view(np.uint8))])
    body = "ld.global.b32 %r5, [%rd4]; st.global.b32 [%rd5], %r5;"
    program = parse(KERNEL.format(body=body, threads=64, local=""))
    execute(program, [far, 256, 0], 1, 64, 0, memory)
    memory.give_back()
    assert result.tolist() == numbers.tolist()


def test_tensors_that_overlap_are_refused_and_parts_are_not() -> None:
    whole = np.zeros(64, np.uint8)
    GlobalMemory([Piece(64, whole), Piece(80, whole[16:32])])
    with pytest.raises(ValueError, match="overlap"):
        GlobalMemory([Piece(64, whole), Piece(100, whole)])


def test_operands_are_read_as_they_are_written() -> None:
    assert operand("0f3F800000") == Immediate(0x3F800000)
    assert operand("0d3FF0000000000000") == Immediate(0x3FF0000000000000)
    assert operand("0x7770U") == Immediate(0x7770)
    assert operand("-12") == Immediate(-12)
    assert operand("%rd7") == Register("rd7")
    with pytest.raises(PtxError, match="no kernel"):
        parse(".version 8.7")
