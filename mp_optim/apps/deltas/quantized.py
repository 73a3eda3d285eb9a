"""Replace published weights by codes in float8 or NVFP4, in the layout of a quantized checkpoint.

The codes are those of the published 16-bit values. Codes of FP32 main params would differ from
codes that an engine makes of the 16-bit weights.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from mp_optim.apps.deltas.publications import (
    Position,
    Weights,
    named_tensors,
    next_parts,
    patch_of,
    position_of,
    published_elements,
)
from mp_optim.core.quantized import scaled_codes
from mp_optim.core.weight_delta import WeightDelta, WeightPatch

Form = Literal["fp8_block", "fp8_row", "nvfp4"]
_SCALES = {"fp8_block": ["_scale_inv"], "fp8_row": ["_scale"], "nvfp4": ["_scale", "_scale_2"]}
# An engine merges the matrices of these layers into one matrix, which has one second scale. So the
# layers need equal second scales.
_MERGED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up"}
_MERGED |= {"up_proj": "gate_up", "w1": "w13", "w3": "w13"}
_FLOAT4_TOP, _FLOAT8_TOP, _FLOAT8_TINY = 6.0, 448.0, 2.0**-6
# A magnitude up to bound i rounds to code i or to a lower code. A tie between two codes goes to the
# even code, so every second bound is the FP32 number just below the middle of two codes.
_FLOAT4_BOUNDS = [0.25, 0.75 - 2.0**-24, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0]


def quantized_weights(weights: Weights, form: Form, names: str) -> dict[str, Tensor]:
    """Return codes and scales of weights, in the layout of a quantized checkpoint. Weights that are
    not quantized are returned unchanged.

    Args:
        weights: a module of plain parameters, or tensors by name, in 16 bits or FP32.
        form: "fp8_block": float8_e4m3fn codes with one FP32 scale ``<name>_scale_inv`` per 128x128
            block. "fp8_row": float8_e4m3fn codes with one FP32 scale ``<name>_scale`` per row.
            "nvfp4": two 4-bit codes per uint8, the even column in the low bits, with one
            float8_e4m3fn scale ``<name>_scale`` per 16 columns and one FP32 scale
            ``<name>_scale_2`` per weight. Layers that an engine merges, such as ``q_proj``,
            ``k_proj`` and ``v_proj``, have equal ``<name>_scale_2``.
        names: patterns of the names of quantized weights, such as
            ``"*_proj.weight|lm_head.weight"``.

    Returns:
        Codes and scales by name. A weight is its codes times all of its scales.

    Raises:
        ValueError: the form is unknown, a pattern matches no name, or a weight cannot be quantized:
            it does not have two dimensions, its values are not finite, or "nvfp4" is given and
            the number of columns is not a multiple of 16.
    """
    tensors = named_tensors(weights)
    chosen = _chosen(tensors, form, names)
    tops = _shared({name: _top(tensors[name]) for name in chosen} if form == "nvfp4" else {})
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_chosen = name in chosen
        found |= _codes(name, tensor, form, tops) if is_chosen else {name: tensor.detach()}
    return found


class DeltaQuantizer:
    """Replaces the weights in publications by codes and scales. The quantizer stores the scales of
    the last publication, and no copy of the weights.

    Args:
        form: arithmetic and layout: "fp8_block", "fp8_row" or "nvfp4"; see
            :func:`quantized_weights`.
        names: patterns of the names of quantized weights, such as
            ``"*_proj.weight|lm_head.weight"``.
    """

    def __init__(self, form: Form, names: str) -> None:
        self._form, self._names = form, names
        self._position: Position | None = None
        self._scales: dict[str, Tensor] = {}
        self._amax: dict[str, float] = {}
        self._tops: dict[str, float] = {}

    @torch.no_grad()
    def quantize(self, delta: WeightDelta | Sequence[WeightDelta], weights: Weights) -> WeightDelta:
        """Return a publication of codes and scales. The publication has the codes of changed
        weights, and all codes of each block with a changed scale.

        Args:
            delta: the next publication of the weights, or the parts of all ranks.
            weights: the published weights, before the next step changes them: the trainer's module,
                or tensors by name to which :func:`mp_optim.apply_delta` wrote the publication.

        Raises:
            ValueError: parts are missing, the publication does not follow the last one, the weights
                differ from the published values, or a weight cannot be quantized.
        """
        parts = next_parts(delta, self._position)
        tensors = named_tensors(weights)
        elements = published_elements(parts, tensors)
        chosen = _chosen(tensors, self._form, self._names)
        amax = dict(self._amax)
        if self._form == "nvfp4":
            unknown = [name for name in chosen if name in elements or name not in amax]
            amax |= {name: _top(tensors[name]) for name in unknown}
        tops = _shared(amax)
        rescaled = [name for name, top in tops.items() if top != self._tops.get(name)]
        elements |= dict.fromkeys(rescaled)
        patches, scales = [], dict(self._scales)
        for name, where in elements.items():
            if name not in chosen:
                patches.append(patch_of(name, tensors[name], where))
                continue
            found = _codes(name, tensors[name], self._form, tops)
            before, scales[name] = scales.get(name), [*found.values()][1]
            if where is not None and before is not None:
                patches += self._changed(tensors[name].shape, found, where, before)
            else:
                patches += [patch_of(*item, None) for item in found.items()]
        self._position, self._scales = position_of(parts), scales
        self._amax, self._tops = amax, tops
        first, watched = parts[0], sum(part.watched for part in parts)
        return WeightDelta(first.run, first.number, first.is_full, 0, 1, watched, tuple(patches))

    def _changed(
        self, shape: torch.Size, found: Mapping[str, Tensor], where: Tensor, before: Tensor
    ) -> Iterator[WeightPatch]:
        """Yield the codes and scales of one weight that differ from the last publication.

        Args:
            shape: shape of the weight.
            found: the weight's present codes and block scales, by name, and its unchanged scale of
                the whole tensor, if it has such a scale.
            where: row-major indices of the changed elements.
            before: the block scales of the last publication.
        """
        (name, codes), (scale_name, scale), *_ = found.items()
        is_stale = scale.float() != before.float()
        rows, columns = _block_of(self._form, shape)
        spread = is_stale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        is_sent = spread[: shape[0], : shape[1]].reshape(-1)
        is_sent[where] = True
        per_code = is_sent.numel() // codes.numel()
        yield patch_of(name, codes, is_sent.view(-1, per_code).any(1).nonzero().view(-1))
        if is_stale.any():
            yield patch_of(scale_name, scale, is_stale.view(-1).nonzero().view(-1))


def _chosen(tensors: Mapping[str, Tensor], form: Form, names: str) -> set[str]:
    """Return the names of the weights to quantize."""
    if form not in get_args(Form):
        raise ValueError(
            f"form={form!r}: this form is unknown; pass one of {', '.join(get_args(Form))}"
        )
    found: set[str] = set()
    for pattern in names.split("|"):
        matching = fnmatch.filter(tensors, pattern)
        if not matching:
            known = ", ".join([*tensors][:3])
            raise ValueError(
                f"names={pattern!r}: matches no weight; pass patterns of names like {known}"
            )
        found.update(matching)
    for name in found:
        shape = tuple(tensors[name].shape)
        if len(shape) != 2 or (form == "nvfp4" and shape[1] % 16):
            raise ValueError(
                f"names={names!r}: {name} has shape {shape}, and {form} needs two dimensions"
                f"{' and a multiple of 16 columns' * (form == 'nvfp4')}; leave {name} out"
            )
    return found


def _top(tensor: Tensor) -> float:
    return float(tensor.detach().abs().amax()) if tensor.numel() else 0.0


def _shared(amax: Mapping[str, float]) -> dict[str, float]:
    """Return the largest magnitude of a layer and of all layers that an engine merges with it, by
    name."""
    keys = {name: ".".join(_MERGED.get(word, word) for word in name.split(".")) for name in amax}
    largest: dict[str, float] = {}
    for name, key in keys.items():
        largest[key] = max(amax[name], largest.get(key, 0.0))
    return {name: largest[key] for name, key in keys.items()}


def _codes(name: str, tensor: Tensor, form: Form, tops: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the codes and then the scales of a weight, by name of the checkpoint's tensor."""
    values = tensor.detach().float()
    found = _four_bits(values, tops[name]) if form == "nvfp4" else _eight_bits(values, form)
    if not all(bool(scale.float().isfinite().all()) for scale in found[1:]):
        raise ValueError(
            f"weights: {name} has values that are not finite, and {form} has no codes for them; "
            f"skip the publication, or leave {name} out of names"
        )
    return dict(zip([name, *(name + suffix for suffix in _SCALES[form])], found, strict=True))


def _block_of(form: Form, shape: torch.Size) -> tuple[int, int]:
    """Return the number of rows and the number of columns of a block with one scale."""
    return {"fp8_block": (128, 128), "fp8_row": (1, max(1, shape[1])), "nvfp4": (1, 16)}[form]


def _eight_bits(values: Tensor, form: Form) -> list[Tensor]:
    (rows, columns), block = values.shape, _block_of(form, values.shape)
    grid = -(-rows // block[0]), -(-columns // block[1])
    padding = 0, grid[1] * block[1] - columns, 0, grid[0] * block[0] - rows
    padded = torch.nn.functional.pad(values, padding)
    scale, codes = scaled_codes(padded, grid, torch.float8_e4m3fn)
    return [codes[:rows, :columns].contiguous(), scale]


def _four_bits(values: Tensor, top: float) -> list[Tensor]:
    """Return codes, block scales and the scale of the tensor, as torchao's ``nvfp4_quantize``."""
    # Divisors are tensors, because CUDA multiplies by the rounded reciprocal of a plain number.
    one = torch.ones((), dtype=torch.float32, device=values.device)
    second = one * top / (one * (_FLOAT8_TOP * _FLOAT4_TOP)) if top else one
    blocks = values.reshape(values.shape[0], -1, 16)
    scale = blocks.abs().amax(2) / (one * _FLOAT4_TOP) / second
    scale = scale.clamp(_FLOAT8_TINY, _FLOAT8_TOP).to(torch.float8_e4m3fn)
    scaled = blocks * (one / second / scale.float())[..., None]
    bounds = torch.tensor(_FLOAT4_BOUNDS, device=values.device)
    magnitudes = torch.bucketize(scaled.abs(), bounds, out_int32=True)
    nibbles = (magnitudes + 8 * scaled.signbit()).to(torch.uint8).view(values.shape)
    return [nibbles[:, ::2] | nibbles[:, 1::2] << 4, scale, second]
