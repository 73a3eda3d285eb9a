"""What AMD's targets get: a kernel compiled for them, and faults that are seen in its text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ptx.amdgcn import read
from support.launch import run

HEAD = """\t.text
kernel:
.LBB0_1:
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\ts_waitcnt vmcnt(0)
{body}\tglobal_store_dword v[4:5], v0, off
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\ts_endpgm
\t\t.amdhsa_float_round_mode_32 0
\t\t.amdhsa_float_round_mode_16_64 0
\t\t.amdhsa_float_denorm_mode_32 {denormals}
\t\t.amdhsa_float_denorm_mode_16_64 3
; Occupancy: 8
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 0
    .sgpr_count:     16
    .vgpr_count:     24
"""
DIVISION = ["v_div_scale_f32", "v_rcp_f32_e32", *["v_fma_f32"] * 4, "v_fmac_f32_e32"]
DIVISION += ["v_mul_f32_e32", "v_div_fmas_f32", "v_div_fixup_f32"]
ROOT = ["v_sqrt_f32_e32", "v_fma_f32", "v_fma_f32", "v_cmp_class_f32_e32"]


def text(*names: str, denormals: int = 3) -> str:
    body = "".join(f"\t{name} v0, v1, v2\n" for name in names)
    return HEAD.format(body=body, denormals=denormals)


def test_a_loop_is_measured() -> None:
    found = read(text("v_add_f32_e32", "s_barrier"), "")
    assert (found.vectors, found.scalars, found.waves, found.scratch) == (24, 16, 8, 0)
    assert (found.loop, found.loop_bytes, found.wide, found.barriers) == (6, 20, 0.8, 1)
    assert found.faults == ()


def test_divisions_and_roots_may_be_fused_and_nothing_else() -> None:
    found = read(text(*DIVISION, *ROOT, *DIVISION), "")
    assert (found.divisions, found.roots, found.fused, found.faults) == (2, 1, 12, ())
    (fault,) = read(text(*DIVISION, "v_fmac_f32_e32"), "").faults
    assert fault == "6 fused operations of f32, 5 are of divisions and roots"
    product = text("v_fma_mix_f32").replace("v0, v1, v2", "v0, v1, s2, neg(0) op_sel_hi:[1,0,0]")
    assert read(product, "").faults == ()
    assert read(text("v_trunc_f64_e32", "v_floor_f64_e32", "v_fma_f64"), "").faults == ()


@pytest.mark.parametrize(
    ("code", "ir", "said"),
    [
        (text("v_rcp_f32_e32"), "", "v_rcp_f32, 1 times beside 0 divisions"),
        (text("v_rsq_f32_e32"), "", "v_rsq_f32, 1 times"),
        (text("v_exp_f32_e32"), "", "v_exp_f32, 1 times"),
        (text("v_fma_mix_f32"), "", "v_fma_mix_f32, 1 times"),
        (text("v_cvt_pkrtz_f16_f32"), "", "v_cvt_pkrtz_f16_f32, 1 times"),
        (text("v_mul_legacy_f32"), "", "v_mul_legacy_f32, 1 times"),
        (text(denormals=0), "", "float_denorm_mode_32 is 0"),
        (text("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0"), "", "the mode is changed"),
        (text(), "%1 = fmul contract float %0, %0", "LLVM may take contract for granted"),
        (text(), "%1 = fdiv float %0, %2, !fpmath !3", "LLVM may round a division"),
        (text(), "%1 = call float @llvm.fma.f32(float %0)", "calls llvm.fma.f32"),
        (text(), "%1 = call float @__ocml_sqrt_f32(float %0)", "calls __ocml_sqrt_f32"),
    ],
)
def test_other_arithmetic_is_seen(code: str, ir: str, said: str) -> None:
    assert any(fault.startswith(said) for fault in read(code, ir).faults)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's back ends are for Linux")
def test_a_kernel_has_the_same_arithmetic_on_amd(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.amd", reason="no AMD back end")
    only = "^adam: float32 - - float32 float32 -, aligned, host$"
    printed = run(
        *("-W", "ignore", "tools/gpu_static.py", "--amd", "--only", only),
        TRITON_CACHE_DIR=str(tmp_path),
    )
    said = [line for line in printed.splitlines() if "the arithmetic is that of the text" in line]
    assert [line.partition(":")[0] for line in said] == ["gfx942", "gfx950"], printed
