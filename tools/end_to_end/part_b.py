"""Part B: the largest models that fit, with the estimate of ``mp-optim fit`` next to each peak."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from end_to_end.contenders import CONTENDERS, Contender, ours
from end_to_end.job import train
from end_to_end.measure import GIB, host_memory_left
from end_to_end.model import empty
from end_to_end.part_a import JOB_COLUMNS, SMALL
from end_to_end.rows import Columns, Part, Row, Sizes, UnfinishedError, cause_of, is_out_of_memory
from mp_optim.apps.fit import command as fit
from mp_optim.apps.fit.fit import Candidate, Estimate, Limits
from mp_optim.apps.fit.recipes import Recipe

EIGHT, FOURTEEN, TWENTY_FOUR = "Qwen3-8B", "Qwen3-14B", "Mistral-Small-24B-Base-2501"
RIVALS: dict[str, tuple[str, ...]] = {
    "torch fused AdamW, pure bf16": (EIGHT, FOURTEEN),
    "bitsandbytes AdamW8bit": (EIGHT, FOURTEEN),
    "torchao AdamW8bit": (EIGHT, FOURTEEN),
    "FlashAdamW, 24 bits": (EIGHT, FOURTEEN),
    "torch fused AdamW, FP32 params, autocast": (EIGHT,),
    "torchao CPUOffloadOptimizer": (FOURTEEN, TWENTY_FOUR),
    "Megatron HybridDeviceOptimizer, 1.0": (EIGHT,),
    "DeepSpeed ZeRO-Offload": (EIGHT,),
    "DeepSpeed SuperOffload": (EIGHT,),
}
"""The largest shape that should fit each rival, if one does, and the next."""
_RELEASED = "released and streamed"


def rows(sizes: Sizes) -> list[Row]:
    """Return ours first, the largest shape before others; then those that need the device alone."""
    job = {"sequences": 2, "sequence": 4096, "micro": 2, "warmup": 1, "steps": 3}
    if sizes.miniature:
        small = {**SMALL, "steps": 1}
        return [
            _ours("tiny", small, gpu="14MiB", ram="1GB"),
            _ours("tiny", small, gpu="1MiB", ram="1GB", tried=_RELEASED),
            _rival("torch fused AdamW, pure bf16", "tiny", small),
        ]
    return [
        _ours(TWENTY_FOUR, job, main_params="remainder8"),
        _ours(FOURTEEN, job),
        _ours(EIGHT, job),
        _ours(FOURTEEN, job, tried=_RELEASED),
        _ours(EIGHT, job, tried=_RELEASED),
        *(_rival(name, shape, job) for name, shapes in RIVALS.items() for shape in shapes),
    ]


def _ours(shape: str, job: Mapping[str, Any], tried: str = "", **arguments: Any) -> Row:
    name = f"ours, {tried or 'as fit says'}, {shape}"
    given = {**job, "shape": shape, "tried": tried, **arguments}
    return Row(name, "part_b:fitted", given, 240, host_left=4)


def _rival(contender: str, shape: str, job: Mapping[str, Any]) -> Row:
    given = {**job, "shape": shape, "contender": contender}
    source = CONTENDERS[contender].source
    return Row(f"{contender}, {shape}", "part_b:trained", given, 240, source, host_left=4)


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
    found, limits = chosen(options, tried)
    words = found.candidate.words
    columns = {
        "settings": ", ".join(f"{name}={value!r}" for name, value in words.items()),
        "estimate": (found.device - limits.reserve) / GIB,
        "estimate_host": found.plan.host_total / GIB,
    }
    if found.missing(limits):
        cause = f"not tried: {fit.verdict(found, limits)}"
        raise UnfinishedError({**columns, "fits": False}, cause)
    columns |= trained(
        device=device, shape=shape, contender=Contender(partial(ours, **words)), **job
    )
    if on_gpu:
        columns["error"] = columns["allocated"] / columns["estimate"] - 1
    return columns


def chosen(options: fit.Options, tried: str) -> tuple[Estimate, Limits]:
    """Return the answer of ``mp-optim fit`` for the job's model, and the machine's memory.

    Args:
        tried: as :func:`fitted` takes it.
    """
    model = empty(options.model, torch.device("meta"), torch.bfloat16)

    def loss_of(module: nn.Module) -> Tensor:
        ids = torch.zeros((options.batch, options.seq), dtype=torch.long, device="cpu")
        return module(ids, ids)  # type: ignore[no-any-return]

    recipe = Recipe(options.model, "AutoModel")
    made = fit.Program(model, loss_of, model.shape.vocab, recipe, False)
    candidates = list(fit.candidates(options))
    found = fit.choose(options, made, filter(_is_released, candidates) if tried else candidates)
    return found, fit.limits_of(options)


def _is_released(candidate: Candidate) -> bool:
    words = candidate.words
    return "release_gradients" in words and words.get("offload_place") == "streamed"


def trained(*, device: torch.device, **job: Any) -> Columns:
    """Train, and say whether the job fits.

    Args:
        job: of :func:`~end_to_end.job.train`.

    Raises:
        UnfinishedError: it ran out of memory.
    """
    try:
        return {**train(device=device, **job), "fits": True}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise UnfinishedError({"fits": False}, cause_of(error)) from error


_SHOWN = ("tokens_per_s", "allocated", "reserved", "rss", "pinned", "clips")
PART = Part(
    "The largest model that fits: 8K tokens a step, blocks checkpointed",
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
)
