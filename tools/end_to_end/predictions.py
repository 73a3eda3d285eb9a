"""What models of memory, bus and operations predict for rows that no GPU has run.

Rates of memory and bus are those that ``docs/benchmarks/gpu-h100.json`` measured; the rest is
arithmetic. Bytes are of a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from end_to_end.model import Shape
from end_to_end.rows import Columns, Row
from mp_optim.apps.fit.step_time import Form, Machine, streamed
from ptx.record import ROOT

EXECUTED = 400e12
"""Operations a second of forward and backward, recomputation included: an assumption."""
BACKWARD = 0.75
"""Share of backward, which runs blocks forward again, in forward and backward."""
SLACK = 1.3
"""A rate below the predicted one by this factor refutes it."""
MEMORY_SLACK = 1.1
"""A peak above the predicted one by this factor refutes it."""
SHARE_SLACK = 0.2
"""A share that differs from the predicted one by more refutes it."""
ACTIVATIONS = {("Qwen3-4B", 2): 2.75e9, ("Qwen3-0.6B", 11): 7.37e9}
"""Bytes of activations and logits at their peak, by shape and sequences of a micro-batch, as
``mp_optim.apps.fit.activations.trace`` counts them for :class:`~end_to_end.model.Model`."""
NVIDIA = (1.678 - 0.752) / Shape("Qwen3-0.6B").params
"""Seconds that Megatron's optimizer adds for a parameter on the host (NeMo-RL#3628, overlapped)."""
FORMS = {False: Form("FP32", 12, False), True: Form("8-bit moments, remainder16", 4, True)}


@dataclass(frozen=True)
class Bill:
    """Bytes of a contender.

    Attributes:
        device: on the GPU, with parameter and gradient. host: in host memory.
        traffic: memory traffic of the GPU after backward.
        exposed: seconds after backward, of the number of parameters and the seconds of backward;
            None if the GPU's traffic is all there is.
    """

    device: float
    host: float
    traffic: float
    exposed: Callable[[int, float], float] | None = None


@cache
def machine() -> Machine:
    """Return the measured rates of an H100's host."""
    file = ROOT / "docs" / "benchmarks" / "gpu-h100.json"
    rows = json.loads(file.read_text())["parts"]["places"]["section"]["rows"]["rates, GB/s"]
    rates = [1e9 * rows[name] for name in ("up", "down", "host", "device")]
    return Machine("H100", *rates)


def _host(update: float) -> Callable[[int, float], float]:
    """Return the time of an update on the host of ``update`` bytes; params go up meanwhile."""
    return lambda params, _: params * update / machine().host


def _hidden(params: int, backward: float) -> float:
    """Return the part of ours on the host that backward does not hide, and the params' way up."""
    work = params * (FORMS[False].on_host) / machine().host
    return max(0.0, work - backward) + params * 2 / machine().up


def _streamed(compact: bool) -> Callable[[int, float], float]:
    return lambda params, _: streamed(machine(), FORMS[compact], params).seconds


def _nvidia(fraction: float) -> Callable[[int, float], float]:
    return lambda params, _: fraction * params * NVIDIA


BILLS: Mapping[str, Bill] = {
    "forward and backward alone": Bill(4, 0, 0),
    "torch fused AdamW, FP32 params, autocast": Bill(18, 0, 40),
    "torch fused AdamW, pure bf16": Bill(8, 0, 20),
    "torchao AdamW8bit": Bill(6, 0, 16),
    "torchao CPUOffloadOptimizer": Bill(4, 8, 0, _host(18)),
    "torchao CPUOffloadOptimizer, gradients too": Bill(2, 8, 0, _host(18)),
    "bitsandbytes AdamW8bit": Bill(6, 0, 16),
    "FlashAdamW, 24 bits": Bill(7, 0, 18),
    "FlashAdamW, 32 bits": Bill(8, 0, 20),
    "DeepSpeed ZeRO-Offload": Bill(4, 16, 0, _host(36)),
    "DeepSpeed SuperOffload": Bill(4, 16, 0, _host(36)),
    "Megatron HybridDeviceOptimizer, 0.0": Bill(20, 0, 46),
    "Megatron HybridDeviceOptimizer, 0.5": Bill(12, 8, 23, _nvidia(0.5)),
    "Megatron HybridDeviceOptimizer, 1.0": Bill(4, 16, 0, _nvidia(1.0)),
    "ours, GPU, FP32": Bill(16, 0, 30),
    "ours, GPU, 8-bit + remainder16": Bill(8, 0, 16),
    "ours, host 0.5, overlap": Bill(10, 7, 15, lambda params, _: _host(30)(params // 2, 0.0)),
    "ours, host, overlap": Bill(4, 14, 0, _host(30)),
    "ours, host, speculative": Bill(4, 26, 0, _hidden),
    "ours, streamed, FP32": Bill(4, 12, 0, _streamed(False)),
    "ours, streamed, 8-bit + remainder16": Bill(4, 4, 0, _streamed(True)),
}


def seconds(contender: str, shape: Shape, tokens: int, sequence: int) -> float:
    """Return the predicted seconds of a step."""
    bill = BILLS[contender]
    whole = tokens * shape.flops(sequence) * 4 / 3 / EXECUTED
    after = shape.params * bill.traffic / machine().device
    return whole + after + (bill.exposed(shape.params, BACKWARD * whole) if bill.exposed else 0.0)


def predicted(row: Row) -> Columns:
    """Return predicted columns of a row of parts A, D and E, else none."""
    arguments = row.arguments
    if "wide" in arguments:
        a_byte = 1e3 * arguments["params"] / machine().device
        theirs, own = (46, 34) if arguments["wide"] else (52, 30)
        return {"theirs_queued": theirs * a_byte, "ours_queued": own * a_byte}
    contender, batch = arguments.get("contender"), (arguments.get("shape"), arguments.get("micro"))
    if contender not in BILLS or batch not in ACTIVATIONS:
        return {}
    made, bill = Shape(batch[0]), BILLS[contender]
    tokens = arguments["sequences"] * arguments["sequence"]
    return {
        "tokens_per_s": tokens / seconds(contender, made, tokens, arguments["sequence"]),
        "allocated": (bill.device * made.params + ACTIVATIONS[batch]) / 2**30,
        "host": bill.host * made.params / 2**30,
    }


def is_refuted(column: str, value: Any, measured: Any) -> bool:
    """True if a measured value refutes a predicted one: yes or no, throughput, memory, a share, or
    something that should be small."""
    if isinstance(value, bool | str):
        return str(measured).partition(":")[0] != str(value)
    if column == "tokens_per_s":
        return bool(measured < value / SLACK)
    if column == "moved_bf16":
        return abs(measured - value) > SHARE_SLACK
    return bool(measured > value * (MEMORY_SLACK if column == "allocated" else SLACK))
