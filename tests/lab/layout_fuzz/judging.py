"""Compare the outcomes of all ranks with the expected one."""

from __future__ import annotations

import math
import re
from itertools import zip_longest

import torch
from torch import Tensor

from lab.layout_fuzz.case import Case, Layout, Param
from lab.layout_fuzz.holding import Place
from lab.layout_fuzz.running import Outcome, same_number

SECONDS = 30.0
"""Within which ranks that disagree have to say so: their groups' timeout, the search for who is
missing, and a machine that does other things as well."""


def faults(case: Case, expected: list[Outcome], phase: int, outcomes: list[Outcome]) -> list[str]:
    if case.disagreement is not None:
        return _unnoticed(case, outcomes)
    raised = [
        f"raised in {each.stage} (step {each.step}): {each.error}" if each.error else ""
        for each in outcomes
    ]
    if any(raised):
        return _by_ranks([[text] if text else [] for text in raised])
    layout, wanted = case.layouts[phase], expected[phase]
    return _by_ranks(
        [_differences(case, layout, rank, wanted, outcome) for rank, outcome in enumerate(outcomes)]
    )


def _by_ranks(texts: list[list[str]]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(texts):
        for text in each:
            ranks.setdefault(text, []).append(rank)
    return [f"ranks {who}: {text}" for text, who in ranks.items()]


def _unnoticed(case: Case, outcomes: list[Outcome]) -> list[str]:
    odd = case.disagreement
    assert odd is not None
    found = []
    for rank, outcome in enumerate(outcomes):
        text = outcome.error
        if not text:
            found.append(f"rank {rank} did not notice {odd}")
        elif rank != odd.rank and not re.search(rf"ranks? [\d, ]*\b{odd.rank}\b", text):
            found.append(f"rank {rank} does not name rank {odd.rank} of {odd}: {text}")
        elif outcome.seconds > SECONDS:
            found.append(f"rank {rank} heard of {odd} after {outcome.seconds:.1f} s")
        elif odd.step >= 0 and outcome.step not in (odd.step, odd.step + 1):
            found.append(f"rank {rank} heard of {odd} in step {outcome.step}: {text}")
    return found


def _differences(
    case: Case, layout: Layout, rank: int, wanted: Outcome, outcome: Outcome
) -> list[str]:
    place, found = Place(case, layout, rank), []
    if outcome.successes != wanted.successes:
        found.append(f"success of each step: {outcome.successes}, expected {wanted.successes}")
    if outcome.zeros != wanted.zeros:
        found.append(f"zeros of each step: {outcome.zeros}, expected {wanted.zeros}")
    norms = list(zip_longest(outcome.norms, wanted.norms, fillvalue=math.inf))
    if not all(_norms_agree(case, *pair) for pair in norms):
        found.append(f"norms {outcome.norms}, expected {wanted.norms}")
    if _exact(case, layout):
        found += _wrong_digests(case, wanted, outcome)
    if layout.has_whole_model:
        losses = [step[rank] for step in wanted.losses]
        pairs = [
            pair
            for mine, theirs in zip(outcome.losses, losses, strict=True)
            for pair in zip(mine, theirs, strict=True)
        ]
        if not all(_losses_agree(case, layout, *pair) for pair in pairs):
            found.append(f"losses {outcome.losses}, expected {losses}")
    found += _wrong_tensors(case, layout, place, wanted.tensors, outcome.tensors)
    return found


def _norms_agree(case: Case, a: float | None, b: float | None) -> bool:
    if case.rough and a is not None and b is not None:  # Ranks add other parts of an FP64 sum.
        return same_number(a, b) or math.isclose(a, b, rel_tol=1e-13)
    return same_number(a, b)


def _losses_agree(case: Case, layout: Layout, a: float | None, b: float | None) -> bool:
    if a is None or b is None or _exact(case, layout):
        return same_number(a, b)
    return same_number(a, b) or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4)


def _exact(case: Case, layout: Layout) -> bool:
    """Whether parameters are promised to the bit. A rough norm may clip with another last bit;
    LAMB's and Muon's sums have another order where others cut them."""
    if case.rough and 0.0 < case.clip < 1e5:
        return False
    return case.rule not in ("lamb", "muon") or layout.kind == "alone"


def _wrong_digests(case: Case, wanted: Outcome, outcome: Outcome) -> list[str]:
    """A class keeps frozen parameters in its param groups, so it digests them. Groups written by
    hand have only trained parameters."""
    frozen = {
        f"model.{layer.name}.{param.name}"
        for layer in case.layers
        for param in layer.params
        if param.frozen
    }
    return [
        f"digest of {name}: {outcome.digest.get(name)}, expected {wanted.digest.get(name)}"
        for name in sorted({*wanted.digest, *outcome.digest} - frozen)
        if outcome.digest.get(name) != wanted.digest.get(name)
    ]


def _wrong_tensors(
    case: Case, layout: Layout, place: Place, wanted: dict[str, Tensor], tensors: dict[str, Tensor]
) -> list[str]:
    whole = {f"{layer.name}.{param.name}": param for layer in case.layers for param in layer.params}
    held = {
        f"{layer.name}.{param.name}"
        for layer in case.layers
        if place.holds(layer)
        for param in layer.params
    }
    found = []
    for key, value in wanted.items():
        name = key.split("/")[1]
        if name not in held or (key not in tensors and not key.startswith("model/")):
            continue  # held by another rank, or shown by one placement alone
        if key not in tensors:
            found.append(f"{key} is missing")
            continue
        mine, param = tensors[key], whole[name]
        theirs = place.part(param, value) if _is_cut_alike(param, value) else value
        if text := _difference(mine, theirs, _exact(case, layout)):
            found.append(f"{key}: {text}")
    return found


def _is_cut_alike(param: Param, value: Tensor) -> bool:
    """Whether state has the dimension along which ranks cut its parameter."""
    if param.splits is None or value.dim() != len(param.shape):
        return False
    return value.shape[param.splits] == param.shape[param.splits]


def _difference(mine: Tensor, theirs: Tensor, exact: bool) -> str:
    if mine.shape != theirs.shape or (exact and mine.dtype != theirs.dtype):
        return f"{tuple(mine.shape)} {mine.dtype}, expected {tuple(theirs.shape)} {theirs.dtype}"
    if torch.equal(mine, theirs) or not mine.numel():
        return ""
    a, b = mine.double(), theirs.double()
    tolerance = 0.0 if exact else _tolerance(mine)
    if bool(torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True).all()):
        return ""
    count = int((~torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)).sum())
    apart = float((a - b).abs().nan_to_num(math.inf).max())
    return f"{count} of {mine.numel()} elements differ by up to {apart:.3g}"


def _tolerance(tensor: Tensor) -> float:
    return (
        4e-6
        if tensor.dtype in (torch.float32, torch.float64)
        else 2.0 * float(torch.finfo(tensor.dtype).eps)
    )
