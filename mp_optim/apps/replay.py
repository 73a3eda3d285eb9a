"""Record a step, and take the recorded step again on a CPU.

$ mp-optim replay FOLDER

A folder has a checkpoint from before the step (``before``), the gradients as a checkpoint
(``gradients``), and ``receipt.json``: config, the decisions about clipping and skipping (verdict),
and the digest of each tensor after the step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.checkpoint import load, save
from mp_optim.checkpoint.commit import write_durably
from mp_optim.checkpoint.common import as_json, from_json, read_common
from mp_optim.checkpoint.digests import changed_element, signed
from mp_optim.checkpoint.entries import MODEL, STATE, key_and_fqn
from mp_optim.checkpoint.inventory import present_entries
from mp_optim.checkpoint.reading import Contents, open_checkpoint
from mp_optim.config import OptimizerConfig
from mp_optim.config.rules import RULES
from mp_optim.core.slot_state import MASTER
from mp_optim.core.state_dict import CHECKSUMS
from mp_optim.factory.get_optimizer import get_megatron_optimizer
from mp_optim.mixed_precision import MegatronOptimizer
from mp_optim.mixed_precision.clip_and_skip import Verdict, decide
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM
from mp_optim.mixed_precision.step import take_step
from mp_optim.offload.hybrid_executor import PlacedExecutor
from mp_optim.process_groups.agreement import Ranks
from mp_optim.rules.rule_executor import RuleExecutor

_BEFORE, _GRADIENTS, _RECEIPT = "before", "gradients", "receipt.json"
_LAST_OF_RULES = "clip_grad"
"""The fields of a config up to this field decide the arithmetic of a step. The fields after it
decide places, ranks and backends, which do not change bits."""
_NORM_ERROR = 1e-12
"""Largest relative difference of two gradient norms that counts as equal. The order of the sums may
change the last bits."""


@contextmanager
def record_step(optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context around one ``optimizer.step()`` that records the step for ``mp-optim
    replay``. Every rank enters the context, after backward.

    The folder gets a checkpoint of parameters and state, the gradients, and after the step the
    digest of each tensor. The record takes as much disk as a checkpoint and the gradients.

    Args:
        optimizer: an optimizer of this package.
        folder: directory that all ranks see; created if missing.

    Raises:
        TypeError: the optimizer, or the optimizer in its wrapper, is not of this package.
        ValueError: a step in one process would have other bits: ``lamb`` or ``muon`` on several
            ranks, or a backend that is not exact.
        RuntimeError: the block took no step, or more than one.
    """
    stack, ranks, path = _checked(optimizer), Ranks.of(), Path(folder)
    names = {slot: stack.slot_name(slot) for slot in stack.slots()}
    params = dict(zip(names.values(), stack.get_parameters(), strict=True))
    # Delete an old receipt first. If this record is interrupted, a replay must not compare new
    # files with the old receipt.
    ranks.run_on_first("recording a step", lambda: (path / _RECEIPT).unlink(missing_ok=True))
    save(path / _BEFORE, _module(params, {}), stack)
    stack.finish_grad_sync()
    local, grads = dict(stack.named_gradients()), {}
    for slot, name in names.items():
        if name in local:
            grads[name] = stack.state_of(slot).layout.show({MASTER: local[name]})[MASTER]
    save(path / _GRADIENTS, _module({}, grads), None, model_parallel=stack.model_parallel)
    steps = stack.counts.steps
    yield
    if stack.counts.steps != steps + 1:
        raise RuntimeError(
            f"record_step: the block took {stack.counts.steps - steps} steps, and a record has "
            "one; call optimizer.step() once in the block"
        )
    verdict = stack.counts.last_verdict()
    whole = stack.model_parallel.among(ranks.members()).names
    groups = {whole[name]: stack.norm_key(slot).group for slot, name in names.items()}
    others = ranks.gather(groups)
    every = [field.name for field in fields(OptimizerConfig)]
    digest = stack.step_digest(sample=1, per_tensor=True)
    receipt = {
        "config": {
            name: getattr(stack.config, name) for name in every[: every.index(_LAST_OF_RULES) + 1]
        },
        "verdict": {
            name: getattr(verdict, name)
            for name in ("multipliers", "cause", "norms", "reason", "scaling")
        },
        "norm_groups": {name: key for of_rank in others for name, key in of_rank.items()},
        "digests": dict(digest.per_tensor),
    }
    content = as_json(receipt)
    ranks.run_on_first("recording a step", lambda: write_durably(path / _RECEIPT, content))


def _checked(optimizer: Any) -> MegatronOptimizer:
    stack = getattr(optimizer, "stack", optimizer)
    if not isinstance(stack, MegatronOptimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__}: only a step of an optimizer of mp_optim can "
            "be repeated; record a step of mp_optim.AdamW, Lion, SGD, LAMB or Muon"
        )
    for executor in (mains.executor for mains in stack.all_mains()):
        parts = executor.executors.values() if isinstance(executor, PlacedExecutor) else [executor]
        if not all(isinstance(part, RuleExecutor) for part in parts):
            raise TypeError(
                f"optimizer={type(stack.optimizer).__name__}: a step of another library's "
                "optimizer cannot be repeated; record a step of mp_optim.AdamW, Lion, SGD, LAMB "
                "or Muon"
            )
    config, size = stack.config, Ranks.of().size
    if size > 1 and RULES[config.optimizer].reads != "elements":
        raise ValueError(
            f"optimizer={config.optimizer!r} on {size} ranks: a replay runs in one process, which "
            f"adds sums in another order than {size} ranks, so its bits would differ; record a "
            "step of a run with one process"
        )
    if config.fused_backend in ("torch", "apex", "transformer_engine"):
        raise ValueError(
            f"fused_backend={config.fused_backend!r}: results of this backend differ in bits from "
            "the CPU kernels, which repeat the step; set fused_backend='auto' in the recorded run"
        )
    return stack


def _module(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """Return a module whose parameters and buffers have full names, which may contain dots."""
    module = nn.Module()
    module._parameters.update(params)  # type: ignore[arg-type]
    module._buffers.update(buffers)
    return module


# -- repetition of a step --------------------------------------------------------------------------


def differences(folder: Path) -> Iterator[str]:
    """Take a recorded step again. Yield one sentence for each value that differs: the gradient
    norm, and then tensors in the order of the parameters.

    Raises:
        FileNotFoundError: the folder has no complete record.
        ValueError: a file is damaged; the message names the tensor or the file.
    """
    receipt = from_json((folder / _RECEIPT).read_bytes())
    before, grads = open_checkpoint(folder / _BEFORE), open_checkpoint(folder / _GRADIENTS)
    for contents in (before, grads):
        for name in contents.entries:
            _read(contents, name)
    saved = receipt["verdict"]
    verdict = Verdict(**{**saved, "scaling": tuple(saved["scaling"])})
    optimizer, params = _built(before, grads, receipt)
    measured = _take_step(optimizer, verdict)
    if measured.norms.keys() and not _are_close(measured, verdict):
        yield (
            f"gradient norm: {verdict.grad_norm!r} when recorded, {measured.grad_norm!r} from the "
            "recorded gradients"
        )
    found = optimizer.step_digest(sample=1, per_tensor=True).per_tensor
    recorded: dict[str, int] = receipt["digests"]
    tensors: dict[str, Tensor] = {}
    for slot, name in zip(optimizer.slots(), params, strict=True):
        tensors |= present_entries(optimizer, slot, name, optimizer.model_parallel)
    for name in {**recorded, **found}:
        if name not in recorded or name not in found:
            yield f"{name}: only {'recorded' if name in recorded else 'in the repetition'}"
        elif recorded[name] != found[name]:
            yield _difference(name, tensors[name], signed(recorded[name] - found[name]))


def _built(
    before: Contents, grads: Contents, receipt: Mapping[str, Any]
) -> tuple[MegatronOptimizer, list[str]]:
    """Return an optimizer of one process with the recorded parameters, state and gradients, and the
    names of the parameters in slot order."""
    params: dict[str, nn.Parameter] = {}
    with_state = {key_and_fqn(name)[1] for name in before.entries if name.startswith(STATE)}
    for entry, held in before.entries.items():
        name = entry.removeprefix(MODEL)
        if entry.startswith(MODEL):
            value = torch.empty(held.shape, dtype=held.dtype, device="cpu")
            trained = entry in grads.entries or name in with_state
            param: Any = nn.Parameter(value, requires_grad=trained)
            params[name] = param
            param.main_grad = _read(grads, entry) if entry in grads.entries else None
            group = receipt["norm_groups"].get(name, MAIN_NORM)
            if group not in (MAIN_NORM, EXCLUDED):
                param.grad_norm_group = group
    module, groups = _module(params, {}), []
    for group in read_common(before.version, before.files)["optimizer"]["param_groups"]:
        settings = {key: value for key, value in group.items() if key != CHECKSUMS}
        groups.append({**settings, "params": [params[name] for name in group["param_names"]]})
    config = OptimizerConfig(**receipt["config"])
    optimizer = get_megatron_optimizer(config, module, param_groups=groups)
    load(before.version, module, optimizer)
    return optimizer, [name for group in groups for name in group["param_names"]]


def _take_step(optimizer: MegatronOptimizer, verdict: Verdict) -> Verdict:
    """Take a step with a recorded verdict, so that the last bits of the norm do not matter. Return
    the verdict that this process would have reached."""
    grads = optimizer.grads_of(optimizer)
    scaling = [torch.tensor([each], dtype=torch.float64, device="cpu") for each in verdict.scaling]
    measured = decide(grads.sums(on_host=True), scaling, optimizer.config)
    take_step(optimizer, (grads, replace(verdict), None))
    return measured


def _are_close(measured: Verdict, verdict: Verdict) -> bool:
    one, other = measured.grad_norm, verdict.grad_norm
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _NORM_ERROR * abs(other)


def _read(contents: Contents, name: str) -> Tensor:
    try:
        return contents.read(name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _difference(name: str, repeated: Tensor, difference: int) -> str:
    """Return a sentence about a tensor whose digest differs from the recorded digest.

    Args:
        name: name of the tensor.
        repeated: the tensor after the repetition.
        difference: recorded digest minus the digest of ``repeated``.
    """
    element = changed_element(name, repeated, difference)
    if element is None:
        return f"{name}: several elements differ"
    index, recorded = element
    mine = repeated.reshape(-1)[index].item()
    return f"{name}, element {index}: {recorded!r} when recorded, {mine!r} in the repetition"


def main(arguments: Sequence[str]) -> int:
    """Run a command line, and return the exit status: 0 for equal bits, 1 for a difference."""
    parser = argparse.ArgumentParser(
        prog="mp-optim replay",
        description="Carry out a step of mp_optim.record_step again, and compare every bit.",
    )
    parser.add_argument("folder", type=Path, help="folder of the record")
    found = list(differences(parser.parse_args(arguments).folder))
    print("\n".join(found) or "every bit is as it was recorded")
    return 1 if found else 0
