"""Part C: equal bits in every place, the loss next to FP32, and weights that a small rate moves."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mp_optim
from benchmarks.timing import Clock
from end_to_end.contenders import CONTENDERS, Contender, ours
from end_to_end.job import Job
from end_to_end.measure import memory
from end_to_end.part_a import SLOW_ON_CPU
from end_to_end.rows import Columns, Part, Record, Row, Sizes

BASE = "ours, on the device"
REFERENCE = "torch fused AdamW, FP32 params, autocast"
_PLACES: dict[str, dict[str, Any]] = {
    BASE: {},
    "ours, host, sync": {"offload": 1.0},
    "ours, host, overlap": {"offload": 1.0, "offload_mode": "overlap"},
    "ours, host, speculative": {"offload": 1.0, "offload_mode": "speculative"},
    "ours, streamed": {"offload": 1.0, "offload_place": "streamed"},
}
_RESUMED = "ours, on the device, resumed streamed"
CONTROL = "control: one bit of a weight flipped on the device"
_OTHERS = (
    *(REFERENCE, "torch fused AdamW, pure bf16", "bitsandbytes AdamW8bit", "torchao AdamW8bit"),
    *("FlashAdamW, 24 bits",),
)
CHECKPOINT = Path("device-checkpoint")
"""In the folder of the part's records; gone when the row that resumes is done."""
LAST = 20
"""Steps at the end of a curve whose mean loss is shown."""


def rows(sizes: Sizes) -> list[Row]:
    """Return ours first, each place and a resume, then FP32 and the others."""
    large = {
        "shape": "Qwen3-0.6B",
        "sequences": 1,
        "sequence": 2048,
        "steps": [300, 200],
        "at": 250,
    }
    small: Columns = {"shape": sizes.shape, "sequences": 2, "sequence": 32}
    small |= {"steps": [12, 8], "at": 10}
    job, mini = (small, True) if sizes.miniature else (large, False)
    first, *places = _PLACES
    found = [_row(first, job, settings=_PLACES[first], saves=True)]
    found += [_row(_RESUMED, job, settings=_PLACES["ours, streamed"], resumes=True)]
    found += [_row(name, job, settings=_PLACES[name]) for name in places]
    if mini:
        found += [_row(CONTROL, job, settings={}, flips=12)]
    others = [name for name in _OTHERS if not (mini and name == SLOW_ON_CPU)]
    return found + [_row(name, job, CONTENDERS[name].source, contender=name) for name in others]


def _row(name: str, job: Mapping[str, Any], source: str = "", **arguments: Any) -> Row:
    return Row(name, "part_c:curve", {**job, **arguments}, 200, source)


# -- one curve ------------------------------------------------------------------------------------

RATES = (3e-4, 1e-6)
"""Learning rates of the first steps and of the last ones."""


def curve(
    *,
    device: torch.device,
    shape: str,
    sequences: int,
    sequence: int,
    steps: tuple[int, int],
    at: int,
    contender: str = "",
    settings: Mapping[str, Any] | None = None,
    saves: bool = False,
    resumes: bool = False,
    flips: int | None = None,
) -> Columns:
    """Train at both of ``RATES``; return losses, digests of the weights and the share that moved.

    Args:
        sequences: of a step. sequence: tokens of each.
        steps: number of steps at each rate.
        at: step after which the first digests are taken.
        contender: key of ``CONTENDERS``; empty for ours with ``settings``.
        settings: of ``mp_optim.AdamW``.
        saves: True to save a checkpoint after step ``at``.
        resumes: True to start from that checkpoint.
        flips: step after which one bit of a weight is flipped, which the digests must show.

    Raises:
        FileNotFoundError: there is no checkpoint to resume from.
    """
    _same_bits_each_time(strict=not contender)
    chosen = CONTENDERS[contender] if contender else Contender(partial(ours, **(settings or {})))
    job = Job(chosen, device, shape, sequences, sequence, sequences, lr=RATES[0])
    model, optimizer, clock, last = job.model, job.loop.optimizer, Clock(device), sum(steps)
    begun, losses, found, before = clock.now(), list[Tensor](), dict[str, Any](), list[Tensor]()
    start = _load(model, optimizer) if resumes else 0
    for step in range(start + 1, last + 1):
        _set_rate(optimizer, RATES[step > steps[0]])
        losses.append(job.backward(step))
        job.loop.step()
        if step == flips:
            _flip(model)
        if step == steps[0]:
            before = [param.detach().clone() for param in model.parameters()]
        if not contender and step in (at, steps[0], last):
            found[str(step)] = digests(model, optimizer)
        if saves and step == at:
            mp_optim.checkpoint.save(CHECKPOINT, model, optimizer, extra={"step": step})
    seconds = clock.seconds(begun, clock.now())
    if resumes:
        shutil.rmtree(CHECKPOINT)
    curve = [round(float(loss), 6) for loss in losses]
    return {
        "losses": curve,
        "loss_middle": _mean(curve[: steps[0] - start]),
        "loss": _mean(curve),
        **_moved(before, model),
        "digests": found,
        "seconds": seconds,
        **memory(device),
    }


def _same_bits_each_time(strict: bool) -> None:
    """Have torch's kernels give the same bits on every run.

    Args:
        strict: True to raise where an operation cannot; False to warn.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it at its first use
    torch.use_deterministic_algorithms(True, warn_only=not strict)


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's: the compiled step reads it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _load(model: nn.Module, optimizer: Any) -> int:
    """Load the checkpoint, and return the step after which it was saved."""
    if not CHECKPOINT.exists():
        raise FileNotFoundError(f"no checkpoint of '{BASE}': delete its record to run it again")
    return int(mp_optim.checkpoint.load(CHECKPOINT, model, optimizer)["step"])


def _flip(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).view(torch.int16)[0, 0] ^= 1


def _mean(losses: list[float]) -> float:
    tail = losses[-LAST:]
    return sum(tail) / len(tail)


def _moved(before: list[Tensor], model: nn.Module) -> Columns:
    """Return the share of weights that have other bits than before, in the model's dtype and
    rounded to bf16."""
    pairs = list(zip(before, model.parameters(), strict=True))
    count = sum(old.numel() for old in before)
    changed = sum(int((old != new).sum()) for old, new in pairs)
    in_bf16 = sum(int((old.bfloat16() != new.bfloat16()).sum()) for old, new in pairs)
    return {"moved": changed / count, "moved_bf16": in_bf16 / count}


def digests(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Return a digest of the bits of each weight and each main param, by name."""
    mains = {f"main param of {name}": value for name, value in optimizer.named_main_params()}
    return {
        name: _digest(value) for name, value in {**dict(model.named_parameters()), **mains}.items()
    }


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


# -- comparisons ----------------------------------------------------------------------------------


def compare(records: list[Record]) -> None:
    """Add to each record how its bits and its losses compare: ours with the bits of ``BASE``, all
    with the losses of ``REFERENCE``."""
    columns = {each["name"]: each["columns"] for each in records if each["columns"]}
    base, reference = columns.get(BASE), columns.get(REFERENCE)
    for name, of_row in columns.items():
        if reference:
            first = len(reference["losses"]) - len(of_row["losses"])
            pairs = zip(of_row["losses"], reference["losses"][first:], strict=True)
            of_row["loss_gap"] = statistics.mean(abs(one - other) for one, other in pairs)
        if of_row["digests"] and name != BASE:
            of_row["same_bits"] = same_bits(of_row, base) if base else f"'{BASE}' was not run"
    for of_row in columns.values():
        of_row["digests"] = {step: _joined(each) for step, each in of_row["digests"].items()}


def _joined(of_tensors: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(of_tensors.items())).encode()).hexdigest()[:16]


def same_bits(of_row: Columns, base: Columns) -> str:
    """Return "yes" and the number of digests and losses that are equal, or the first difference.

    A row that was resumed has no losses and digests of earlier steps.
    """
    first = len(base["losses"]) - len(of_row["losses"])
    for step, (one, other) in enumerate(zip(of_row["losses"], base["losses"][first:], strict=True)):
        if one != other:
            unequal = f"no: the loss of step {first + step + 1} is {one}, not {other}"
            break
    else:
        unequal = ""
    steps = [step for step in base["digests"] if int(step) > first]
    for step in steps:
        here, there = of_row["digests"].get(step, {}), base["digests"][step]
        other = [name for name in {**there, **here} if here.get(name) != there.get(name)]
        if other:
            return f"no: {len(other)} of {len(there)} tensors after step {step}, {other[0]} first"
    if unequal or not steps:
        return unequal or "no: nothing to compare"
    return f"yes: {len(there)} tensors after steps {', '.join(steps)}"


PART = Part(
    "Same bits, same curve: Qwen3-0.6B shape, 300 steps at 3e-4 and 200 at 1e-6",
    rows,
    {
        "same_bits": f"bits of '{BASE}'",
        "loss_middle": "loss, last steps at 3e-4",
        "loss": "loss, last steps at 1e-6",
        "loss_gap": "mean difference from FP32's loss",
        "moved_bf16": "share of bf16 weights that 1e-6 moved",
        "moved": "the same in the model's own dtype",
        "seconds": "seconds",
        "allocated": "peak GiB allocated",
    },
    10,
    compare,
    Path(__file__).with_suffix(".md").read_text(),
)
