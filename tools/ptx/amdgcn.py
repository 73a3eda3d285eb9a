"""What is read in the text that Triton's AMD back end makes of a kernel, which nothing here can
carry out: registers, widths of accesses, and whether each operation is the one that the kernel
asks for, rounded as the format says.

Judged are the LLVM text (no contraction, no licence to approximate) and the instructions: the
kernel's modes round to the nearest and keep denormals, and every instruction on floating-point
numbers is one of those that are exact, or belongs to a division or root as LLVM expands them where
nothing less than the correctly rounded result will do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MODES = {
    "float_round_mode_32": "0",
    "float_round_mode_16_64": "0",
    "float_denorm_mode_32": "3",
    "float_denorm_mode_16_64": "3",
}
"""To the nearest, ties to even; denormals are kept, read and written."""
_EXACT = re.compile(
    r"""v_(
    (pk_)?(add|mul)_f(16|32) | (sub|subrev)_f(16|32) | (add|mul)_f64
    | (max|min)(imum|imum3|3)?(_num)?_f(16|32|64) | med3_f32
    | ldexp_f(32|64) | (rndne|trunc|floor|ceil)_f(32|64) | frexp_(mant|exp_i32)_f(32|64)
    | cmpx?_(class|f|t|o|u|n?(lt|eq|le|gt|lg|ge))_f(16|32|64) | cmpx?_(neq|tru)_f(16|32|64)
    | cvt_f32_(f16|f64|bf16|[iu]32|ubyte[0-3]) | cvt_f64_(f32|[iu]32)
    | cvt_[iu](16|32)_f(16|32|64) | cvt_f16_f32 | cvt_pk_bf16_f32
    | div_(scale|fmas|fixup)_f(32|64) | pack_b32_f16
    )""",
    re.VERBOSE,
)
_FLOATS = re.compile(r"v_\w*?_?(?:f16|f32|f64|bf16|bf8|fp8)(?:_|$)")
_ENCODING = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp)$")
_FUSED = {"v_fma_f32": 1, "v_fmac_f32": 1, "v_pk_fma_f32": 2, "v_fma_f64": 1, "v_fmac_f64": 1}
_OF_A_DIVISION = {"v_div_fmas_f32": 5, "v_div_fmas_f64": 5}
"""Fused operations of a division besides this one. ``v_div_fixup`` may stand in each branch."""
_OF_A_ROOT = {"v_sqrt_f32": 2}
"""What looks whether the next number above or below is nearer."""
_TO_LONG = "v_floor_f64"
"""Of a double that becomes an integer of 64 bits. A fused operation follows, which is exact: what
is left below 2^32."""
_A_PRODUCT = re.compile(r"^\tv_fma_mix_f32 (?=.*, neg\(0\) op_sel)", re.MULTILINE)
"""Of numbers of 16 and 32 bits, to which -0 is added: that changes nothing."""
_SEED = {"v_rcp_f32": "v_div_fmas_f32", "v_rcp_f64": "v_div_fmas_f64"}

_WIDTHS = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4}
_NARROW = {"short": 2, "ushort": 2, "sshort": 2, "byte": 1, "ubyte": 1, "sbyte": 1}
_ACCESS = re.compile(r"(?:global|buffer|flat)_(?:load|store)_([a-z0-9]+)")
_LINE = re.compile(r"^\t([a-z]\w+)([^;\n]*)", re.MULTILINE)
_LABEL = re.compile(r"^(\.L\w+):", re.MULTILINE)
_BRANCH = re.compile(r"^\ts_c?branch\w*\s+(\.L\w+)", re.MULTILINE)

_LICENCES = re.compile(
    r"\b(?:fadd|fsub|fmul|fdiv|frem|fneg|call)\b[^@\n]*"
    r"\b(fast|reassoc|arcp|contract|afn)\b[^@\n]*"
)
"""``nnan``, ``ninf`` and ``nsz`` LLVM writes by itself, where it has proven them."""
_CALLS = re.compile(r"\bcall\b[^@\n]*@([\w.]+)\(")
_ROUNDED = re.compile(
    r"llvm\.(sqrt|fabs|copysign|minnum|maxnum|minimum|maximum|minimumnum|maximumnum|floor|ceil"
    r"|trunc|rint|roundeven|nearbyint|is\.fpclass|canonicalize|ldexp)\."
)
_NO_NUMBERS = re.compile(
    r"llvm\.(amdgcn\.(workgroup|workitem|raw\.ptr\.buffer|make\.buffer|s\.barrier|readfirstlane"
    r"|readlane|ds\.|update\.dpp|mov\.dpp|permlane|mbcnt|wave|fence|s\.waitcnt|sched|perm|implicit"
    r"|dispatch|kernarg|ballot|set\.inactive|if|else|end|loop)"
    r"|abs|[us]max|[us]min|fsh[lr]|ctlz|cttz|ctpop|bswap|bitreverse|[us]add|[us]sub|[us]mul|assume"
    r"|lifetime|vector\.reduce\.(fadd|fmul|add|or|and|xor|[us]max|[us]min)|experimental\.noalias)"
)


@dataclass(frozen=True)
class Amdgcn:
    """A kernel's text.

    Attributes:
        vectors, scalars: registers. scratch: bytes of a thread, spilled ones among them. shared:
            bytes of a block.
        waves: of 64 threads, that a SIMD holds, as LLVM says.
        instructions: all. loop: those of the loop that moves most bytes; 0 if there is none.
        loop_bytes: what a thread reads and writes in it.
        wide: share of that in accesses of 16 bytes. barriers: in the loop.
        divisions, roots: of floating-point numbers. fused: multiplications and additions in one.
        faults: what may make other bits than ``reference`` has.
    """

    vectors: int
    scalars: int
    scratch: int
    shared: int
    waves: int
    instructions: int
    loop: int
    loop_bytes: int
    wide: float
    barriers: int
    divisions: int
    roots: int
    fused: int
    faults: tuple[str, ...]


def read(text: str, ir: str) -> Amdgcn:
    """A kernel's text; ``ir``: what it was in LLVM."""
    code = _A_PRODUCT.sub(r"\tv_mul_f32 ", text)
    names = [_plain(match[1]) for match in _LINE.finditer(code)]
    counts = Counter(names)
    loop = max(_loops(code), key=_width_of, default=[])
    moved = _bytes_of(loop)
    return Amdgcn(
        _number(text, r"\.vgpr_count:\s+(\d+)"),
        _number(text, r"\.sgpr_count:\s+(\d+)"),
        _number(text, r"\.private_segment_fixed_size:\s+(\d+)"),
        _number(text, r"\.group_segment_fixed_size:\s+(\d+)"),
        _number(text, r"; Occupancy: (\d+)"),
        len(names),
        len(loop),
        sum(moved.values()),
        moved[16] / max(1, sum(moved.values())),
        sum(name == "s_barrier" for name in loop),
        sum(counts[name] for name in _OF_A_DIVISION),
        sum(counts[name] for name in _OF_A_ROOT),
        sum(counts[name] * each for name, each in _FUSED.items()),
        (*_faults_of_ir(ir), *_faults_of(text, counts)),
    )


def _plain(name: str) -> str:
    return _ENCODING.sub("", name)


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


# -- judging --------------------------------------------------------------------------------------


def _faults_of(text: str, counts: Counter[str]) -> Iterator[str]:
    for mode, wanted in _MODES.items():
        found = re.search(rf"\.amdhsa_{mode} (\d)", text)
        if found is None or found[1] != wanted:
            yield f"{mode} is {found[1] if found else 'not said'}"
    if "HW_REG_MODE" in text:
        yield "the mode is changed on the way"
    for name, count in sorted(counts.items()):
        is_known = _EXACT.fullmatch(name) or name in _FUSED or name in _OF_A_ROOT or name in _SEED
        if _FLOATS.match(name) and not is_known:
            yield f"{name}, {count} times"
    for seed, end in _SEED.items():
        if counts[seed] != counts[end]:
            yield f"{seed}, {counts[seed]} times beside {counts[end]} divisions"
    for kind in ("f32", "f64"):
        fused = sum(each * counts[name] for name, each in _FUSED.items() if name.endswith(kind))
        parts = {**_OF_A_DIVISION, **_OF_A_ROOT}
        due = sum(each * counts[name] for name, each in parts.items() if name.endswith(kind))
        due += counts[_TO_LONG] if kind == "f64" else 0
        if fused != due:
            yield f"{fused} fused operations of {kind}, {due} are of divisions and roots"


def _faults_of_ir(ir: str) -> Iterator[str]:
    for what in sorted({match[1] for match in _LICENCES.finditer(ir)}):
        yield f"LLVM may take {what} for granted"
    if re.search(r"\b(?:fdiv|call)\b.*!fpmath", ir):
        yield "LLVM may round a division or root otherwise"
    for name in sorted(set(_CALLS.findall(ir))):
        if not _ROUNDED.match(name) and not _NO_NUMBERS.match(name):
            yield f"calls {name}"


# -- the loop -------------------------------------------------------------------------------------


def _loops(code: str) -> Iterator[list[str]]:
    """The instructions from each label to a branch back to it."""
    labels = {match[1]: match.start() for match in _LABEL.finditer(code)}
    for branch in _BRANCH.finditer(code):
        start = labels.get(branch[1], branch.end())
        if start < branch.start():
            yield [_plain(match[1]) for match in _LINE.finditer(code, start, branch.end())]


def _width_of(names: Sequence[str]) -> int:
    """How many bytes, the more the wider: where as many are moved in a tail, that is not meant."""
    return sum(width * count for width, count in _bytes_of(names).items())


def _bytes_of(names: Sequence[str]) -> Counter[int]:
    """Bytes of tensors that some instructions move, by the width of the access."""
    found: Counter[int] = Counter()
    for name in names:
        for width in _ACCESS.findall(name):
            size = _WIDTHS.get(width) or _NARROW.get(width.partition("_")[0], 0)
            found[size] += size
    return found
