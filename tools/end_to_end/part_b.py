"""Part B: the largest models that fit, with the estimate of ``mp-optim fit`` next to each peak."""

from __future__ import annotations

import json
import resource
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from end_to_end.contenders import CONTENDERS, Contender, ours
from end_to_end.job import train
from end_to_end.measure import GIB, host_memory_left
from end_to_end.model import Shape, empty
from end_to_end.part_a import JOB_COLUMNS
from end_to_end.rows import Columns, Part, Row, Sizes, UnfinishedError, cause_of, is_out_of_memory
from mp_optim.apps.fit import command as fit
from mp_optim.apps.fit.activations import Timeline, as_fake, trace, trace_repeating
from mp_optim.apps.fit.fit import Candidate, Estimate, Limits
from mp_optim.apps.fit.recipes import Recipe

EIGHT, FOURTEEN, TWENTY_FOUR = "Qwen3-8B", "Qwen3-14B", "Mistral-Small-24B-Base-2501"


@dataclass(frozen=True)
class Kept:
    """Bytes a parameter that an optimizer keeps, by its own description.

    Attributes:
        device: on the device, in addition to the parameter and its gradient.
        host: on the host.
        releases: True if gradients leave the device during backward.
        shapes: the largest that should fit, if one does, and the next.
    """

    device: float
    host: float = 0.0
    releases: bool = False
    shapes: tuple[str, ...] = (EIGHT, FOURTEEN)


_8BIT = 2 + 2 * 4 / 256  # two moments, an FP32 scale for each 256 elements
RIVALS = {
    "torch fused AdamW, pure bf16": Kept(4),
    "bitsandbytes AdamW8bit": Kept(_8BIT),
    "torchao AdamW8bit": Kept(_8BIT),
    "FlashAdamW, 24 bits": Kept(2 + 2 * 2 / 32 + 1),
    "torch fused AdamW, FP32 params, autocast": Kept(8, shapes=(EIGHT,)),
    "torchao CPUOffloadOptimizer": Kept(0, 8, shapes=(FOURTEEN, TWENTY_FOUR)),
    "Megatron HybridDeviceOptimizer, 1.0": Kept(0, 16, shapes=(EIGHT,)),
    "DeepSpeed ZeRO-Offload": Kept(0, 16, releases=True, shapes=(EIGHT,)),
    "DeepSpeed SuperOffload": Kept(0, 16, releases=True, shapes=(EIGHT,)),
}
_RELEASED = "released and streamed"


def rows(sizes: Sizes) -> list[Row]:
    """Return ours first, the largest shape before others; then those that need the device alone."""
    if sizes.miniature:
        return _miniature()
    job = {"sequences": 2, "sequence": 4096, "micro": 2, "warmup": 1, "steps": 3}
    found = [
        _ours(TWENTY_FOUR, job, main_params="remainder8"),
        _ours(FOURTEEN, job),
        _ours(EIGHT, job),
        _ours(FOURTEEN, job, tried=_RELEASED),
        _ours(EIGHT, job, tried=_RELEASED),
    ]
    return found + [
        _rival(name, shape, job) for name, kept in RIVALS.items() for shape in kept.shapes
    ]


def _miniature() -> list[Row]:
    """Return a row of each kind; the last one has too little memory."""
    job = {"shape": "tiny", "sequences": 2, "sequence": 32, "micro": 2, "warmup": 1, "steps": 1}
    found = [
        _ours("tiny", job, gpu="12MiB", ram="1GB"),
        _ours("tiny", job, gpu="20MiB", ram="1GB", tried=_RELEASED, main_params="remainder8"),
        _rival("torch fused AdamW, pure bf16", "tiny", job),
        _rival("torch fused AdamW, FP32 params, autocast", "tiny", job),
    ]
    return [*found, _rival("torch fused AdamW, pure bf16", EIGHT, {**job, "limit": 1 << 30})]


def _ours(shape: str, job: Mapping[str, Any], tried: str = "", **arguments: Any) -> Row:
    name = f"ours, {tried or 'as fit says'}, {shape}"
    given = {**job, "shape": shape, "tried": tried, **arguments}
    return Row(name, "part_b:fitted", given, 240, host_left=4)


def _rival(contender: str, shape: str, job: Mapping[str, Any]) -> Row:
    given = {**job, "shape": shape, "contender": contender}
    source = CONTENDERS[contender].source
    return Row(f"{contender}, {shape}", "part_b:rival", given, 240, source, host_left=4)


# -- ours -----------------------------------------------------------------------------------------


def fitted(
    *,
    device: torch.device,
    shape: str,
    tried: str,
    main_params: Any = "exact",
    gpu: str = "",
    ram: str = "",
    **job: Any,
) -> Columns:
    """Train with the settings that ``mp-optim fit`` chooses for this machine.

    Args:
        tried: "" for all settings that it tries; otherwise the released and streamed ones alone.
        main_params: the option of that name.
        gpu, ram: memory to fit; by default the device's, and the host's that is free.
        job: of :func:`~end_to_end.job.train`.

    Raises:
        UnfinishedError: it does not fit, by the estimate or in truth.
    """
    on_gpu = device.type == "cuda"
    device_bytes = torch.cuda.mem_get_info(device)[1] if on_gpu else 0
    options = fit.Options(
        shape,
        gpu or f"{device_bytes / GIB}GiB",
        ram or f"{host_memory_left()}GiB",
        seq=job["sequence"],
        batch=job["micro"],
        main_params=main_params,
        reserve="1GiB" if on_gpu else "0GiB",
        host_reserve="4GiB" if on_gpu else "0GiB",
    )
    found, limits, columns = chosen(options, tried)
    if found.missing(limits):
        raise UnfinishedError(
            {**columns, "fits": False}, f"not tried: {fit.verdict(found, limits)}"
        )
    contender = Contender(partial(ours, **found.candidate.words))
    return _trained(device, columns, contender, shape, job)


def chosen(options: fit.Options, tried: str) -> tuple[Estimate, Limits, Columns]:
    """Return the answer of ``mp-optim fit`` for the job's model, the machine's memory, and columns
    about them.

    Args:
        tried: as :func:`fitted` takes it.
    """
    made = program(options.model, options.seq, options.batch)
    candidates = list(fit.candidates(options))
    found = fit.choose(options, made, filter(_is_released, candidates) if tried else candidates)
    limits = fit.limits_of(options)
    words = found.candidate.words.items()
    columns = {
        "settings": ", ".join(f"{name}={value!r}" for name, value in words) or "the defaults",
        "estimate": (found.device - limits.reserve) / GIB,
        "estimate_host": found.plan.host_total / GIB,
    }
    return found, limits, columns


def _is_released(candidate: Candidate) -> bool:
    words = candidate.words
    return "release_gradients" in words and words.get("offload_place") == "streamed"


def program(shape: str, sequence: int, micro: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the job's model and loss as ``mp-optim fit`` takes them."""
    model = empty(shape, torch.device("meta"), dtype)
    autocast = dtype == torch.float32

    def loss_of(module: nn.Module) -> Tensor:
        ids = torch.zeros((micro, sequence), dtype=torch.long, device="cpu")
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            return module(ids, ids)  # type: ignore[no-any-return]

    recipe = Recipe(shape, "AutoModel", micro, sequence)
    return fit.Program(model, loss_of, model.shape.vocab, recipe, False)


# -- rivals ---------------------------------------------------------------------------------------


def rival(
    *, device: torch.device, shape: str, contender: str, limit: int = 0, **job: Any
) -> Columns:
    """Train with another optimizer, with an estimate made of its own description.

    Args:
        contender: key of ``RIVALS``.
        limit: bytes that this process may take of the host from here on; 0 for no limit.
        job: of :func:`~end_to_end.job.train`.

    Raises:
        UnfinishedError: it ran out of memory.
    """
    columns = expected(contender, shape, job["sequence"], job["micro"])
    with _limited(limit) if limit else nullcontext():
        return _trained(device, columns, CONTENDERS[contender], shape, job)


def expected(contender: str, shape: str, sequence: int, micro: int) -> Columns:
    """Return the GiB that a rival should take of the device, without CUDA itself, and the host."""
    kept, dtype = RIVALS[contender], CONTENDERS[contender].dtype
    made, params = program(shape, sequence, micro, dtype), Shape(shape).params
    timeline = traced(made)
    working = timeline.peak((lambda made: 0) if kept.releases else (lambda made: made))
    stepping = 0 if kept.releases else timeline.grads
    device = params * (dtype.itemsize + kept.device) + max(
        working.activations + working.grads, stepping
    )
    return {"estimate": device / GIB, "estimate_host": params * kept.host / GIB}


def traced(made: Any) -> Timeline:
    """Return the memory of a forward and a backward of a program."""
    fake = as_fake(made.model)
    return trace_repeating(
        made.model, lambda: trace(made.model, fake, made.loss_of, vocabulary=made.vocabulary)
    )


@contextmanager
def _limited(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# -- both -----------------------------------------------------------------------------------------


def _trained(
    device: torch.device, columns: Columns, contender: Contender, shape: str, job: Mapping[str, Any]
) -> Columns:
    print(columns, flush=True)  # which the log keeps if the system ends this process
    call = partial(train, device=device, shape=shape, contender=contender, **job)
    try:
        found = call() if device.type == "cuda" else _counted(call)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise UnfinishedError({**columns, "fits": False}, cause_of(error)) from error
    columns = {**columns, **found, "fits": True}
    on_host = 0.0 if device.type == "cuda" else columns["estimate_host"]
    return {**columns, "error": columns["allocated"] / (columns["estimate"] + on_host) - 1}


def _counted(call: Callable[[], Columns]) -> Columns:
    """Return a call's columns, and the GiB that torch's allocator of the host gave out at most."""
    memory = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with torch.backends.mkldnn.flags(enabled=False), memory as profiler:
        columns = call()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return {**columns, "allocated": peak / GIB}


# -- predictions ----------------------------------------------------------------------------------

ESTIMATES = Path(__file__).with_name("part_b_estimates.json")
"""GiB of each row on a machine, as ``python -m end_to_end.part_b`` writes them."""
GPU, RAM = "80GB", "128GB"


def estimate(row: Row) -> Columns:
    """Return the GiB of a row on a machine of ``GPU`` and ``RAM``, and whether it should run."""
    given, job = row.arguments, {"seq": row.arguments["sequence"], "batch": row.arguments["micro"]}
    form = given.get("main_params", "exact")
    options = fit.Options(given["shape"], GPU, RAM, **job, main_params=form)
    limits = fit.limits_of(options)
    if "contender" in given:
        columns = expected(given["contender"], given["shape"], job["seq"], job["batch"])
    else:
        columns = chosen(options, given["tried"])[2]
    device = int(columns["estimate"] * GIB) + limits.reserve
    host = int(columns["estimate_host"] * GIB) + limits.host_reserve
    found = {"allocated": columns["estimate"], "host": columns["estimate_host"]}
    rounded = {name: round(value, 2) for name, value in found.items()}
    return {**rounded, "fits": device <= limits.device and host <= limits.host}


@cache
def _estimates() -> dict[str, Columns]:
    return json.loads(ESTIMATES.read_text())  # type: ignore[no-any-return]


def predict(row: Row) -> Columns:
    """Return the predicted columns of a row; the miniature's rows have none."""
    return _estimates().get(row.name, {})


_SHOWN = ("tokens_per_s", "allocated", "reserved", "rss", "pinned", "clips")
PART = Part(
    "What fits: 8K tokens a step, blocks checkpointed",
    rows,
    {
        "fits": "fits",
        "estimate": "GiB estimated there",
        "error": "allocated beyond the estimate, share",
        "estimate_host": "host GiB estimated there",
        **{name: JOB_COLUMNS[name] for name in _SHOWN},
        "settings": "settings by fit",
    },
    14,
    text=Path(__file__).with_suffix(".md").read_text(),
    predict=predict,
)


if __name__ == "__main__":
    made = {row.name: estimate(row) for row in rows(Sizes())}
    ESTIMATES.write_text(json.dumps(made, indent=1) + "\n")
