"""The PTX machine executes divergent threads and reports races, bad accesses and inexact
instructions."""

from typing import Any

import numpy as np
import pytest

from ptx.machine import DivergedError, InexactError, execute
from ptx.memory import GlobalMemory, MisalignedError, OutOfBoundsError, Piece, RaceError
from ptx.parser import PtxError, parse

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
    numbers = np.arange(64 * 4, dtype=np.uint32) if given is None else given
    result = np.zeros(count, np.uint32)
    memory = GlobalMemory(
        [Piece(READ, numbers.view(np.uint8)), Piece(WRITTEN, result.view(np.uint8))]
    )
    program = parse(KERNEL.format(body=body, threads=threads, local=local))
    execute(program, [READ, WRITTEN, number], blocks, threads, shared, memory)
    memory.give_back()
    return result


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


def test_ptx_machine_gives_each_block_its_shared_memory():
    found = carried_out(SHARED.format(barrier="bar.sync 0;", other=128), count=128, blocks=2)
    assert found.tolist() == [n ^ 32 for n in range(128)]


def test_ptx_machine_reports_a_race_without_a_barrier():
    with pytest.raises(RaceError, match="reads what another wrote"):
        carried_out(SHARED.format(barrier="", other=128))
    with pytest.raises(RaceError, match="reads what another wrote"):
        # The writer is in another warp.
        carried_out(SHARED.format(barrier="bar.warp.sync -1;", other=128))
    found = carried_out(SHARED.format(barrier="bar.warp.sync -1;", other=4))
    assert found.tolist() == [n ^ 1 for n in range(64)]


def test_ptx_machine_reports_a_race_when_two_threads_write_one_address():
    with pytest.raises(RaceError, match="writes what another writes"):
        carried_out("st.global.b32 [%rd2], %r3;")
    body = "setp.eq.s32 %p1, %r4, {}; @%p1 st.global.b32 [%rd2], %r3;"
    with pytest.raises(RaceError, match="writes what another wrote"):
        carried_out(body.format(0) + body.format(64), blocks=2)


def test_ptx_machine_reports_a_race_when_a_block_writes_after_another_read():
    body = """
	ld.global.b32 %r5, [%rd2];
	bar.sync 0;
	setp.eq.s32 %p1, %r4, 70;
	@%p1 st.global.b32 [%rd2], %r5;
"""
    with pytest.raises(RaceError, match="writes what another read"):
        carried_out(body, blocks=2)
    # One block with a barrier has an order.
    assert carried_out(body.replace("70", "7")).tolist() == [0] * 64


def test_ptx_machine_refuses_access_outside_every_tensor():
    with pytest.raises(OutOfBoundsError, match="near a tensor of 252 bytes"):
        carried_out("st.global.b32 [%rd5], %r4;", count=63)
    with pytest.raises(OutOfBoundsError):
        carried_out("ld.global.b32 %r5, [%rd4+-4]; st.global.b32 [%rd5], %r5;")
    with pytest.raises(OutOfBoundsError, match="its own memory"):
        carried_out(SHARED.format(barrier="", other=0), shared=252)


def test_ptx_machine_refuses_misaligned_wide_access():
    with pytest.raises(MisalignedError, match="8 bytes"):
        carried_out("ld.global.v2.b32 {%r5, %r6}, [%rd4]; st.global.b32 [%rd5], %r5;")


def test_ptx_machine_refuses_barrier_that_some_threads_skip():
    with pytest.raises(DivergedError, match=r"bar\.sync"):
        carried_out("setp.lt.s32 %p1, %r2, 32; @%p1 bra $L_x; bar.sync 0;\n$L_x:")
    with pytest.raises(DivergedError, match=r"shfl\.sync"):
        carried_out("setp.lt.s32 %p1, %r2, 5; @%p1 shfl.sync.bfly.b32 %r5, %r4, 5, 31, -1;")


def test_ptx_machine_refuses_inexact_instructions():
    with pytest.raises(InexactError, match=r"div\.full\.f32"):
        carried_out("div.full.f32 %r5, %r4, %r4;")
    # The assembler may contract this addition.
    with pytest.raises(InexactError, match=r"add\.f32"):
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
def test_ptx_machine_refuses_unknown_instructions(line):
    with pytest.raises(PtxError):
        carried_out(line)


def test_global_memory_refuses_overlapping_tensors_except_views():
    whole = np.zeros(64, np.uint8)
    GlobalMemory([Piece(64, whole), Piece(80, whole[16:32])])
    with pytest.raises(ValueError, match="overlap"):
        GlobalMemory([Piece(64, whole), Piece(100, whole)])
