"""Storage formats of a slot's state: conversion to FP32, from FP32, and between formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.combinations import check_state_forms
from mp_optim.config.fields import check_field
from mp_optim.config.rules import moment_of
from mp_optim.config.state_forms import (
    CODED,
    FIRST_FORMS,
    NO_REMAINDER,
    REMAINDERS,
    SECOND_FORMS,
    blocks_of,
    packed_bytes,
)
from mp_optim.core.slot_state import (
    AVERAGE,
    MASTER,
    MOMENT2,
    REMAINDER,
    SECOND,
    Coded,
    State,
    as_master,
    is_scale,
    scale_key,
)
from mp_optim.host.host_memory import TensorSpec, same_values, zeros
from mp_optim.kernels.codecs import (
    decode,
    encode_again_,
    is_blocked,
    is_packed,
    join,
    split_,
    state_form,
)
from mp_optim.kernels.kernel_args import fp32


@dataclass(frozen=True)
class StatePrecision:
    """Storage formats of a rule's state.

    Attributes:
        exp_avg_dtype: dtype of the first moment or momentum: float32, bfloat16, float16, uint8 or
            uint4 (see ``codecs``).
        exp_avg_sq_dtype: dtype of the second moment: float32, bfloat16, float16 or uint8.
        fp32_state_below: number of elements; smaller parameters have FP32 moments instead of 8-bit
            or 4-bit moments.
        store_param_remainders: True to step bfloat16 parameters in place, with a remainder that
            completes them to FP32.
        param_remainder_bits: 16 for all of FP32, 8 for the upper 24 bits of FP32, or 0 for the
            parameter alone with stochastic rounding.
        stochastic_rounding: True for stochastic rounding of bfloat16, 8-bit and 4-bit state.
        seed: 32-bit seed of the random bits.
        ema_decay: decay of the averages of main params; None for no averages.
        ema_dtype: dtype of the averages, float32 or bfloat16.

    Raises:
        ValueError: a value is not supported. The message names the field.
    """

    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    fp32_state_below: int = 0
    store_param_remainders: bool = False
    param_remainder_bits: int = 16
    stochastic_rounding: bool = False
    seed: int = 0
    ema_decay: float | None = None
    ema_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("param_remainder_bits", "ema_decay"):
            check_field(name, getattr(self, name))
        check_state_forms(self)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed!r}: is not in [0, 2**32); set a 32-bit number")

    def is_small(self, elements: int) -> bool:
        """True if a whole parameter of this number of elements has FP32 moments, because the
        number is below ``fp32_state_below``."""
        return elements < self.fp32_state_below

    def stored_dtype(self, moment: str, is_small: bool) -> torch.dtype:
        """Return the dtype of the stored tensor of a moment.

        4-bit codes of a first moment are stored in pairs as uint8.

        Args:
            moment: name of the moment.
            is_small: True if the parameter is small (:meth:`is_small`).
        """
        source = moment_of(moment).dtype_field
        asked = torch.float32 if source is None else getattr(self, source)
        if is_small and asked in CODED:
            asked = torch.float32
        forms = SECOND_FORMS if moment == SECOND else FIRST_FORMS
        return next((form.dtype for form in forms if form.name == asked), asked)

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the main param for a parameter of this dtype."""
        return dtype if dtype == torch.bfloat16 and self.store_param_remainders else torch.float32

    def average_weight(self, step: int) -> float:
        """Return the FP32 weight of a new main param in its average at a step, counted from 1."""
        if step == 1 or self.ema_decay is None:
            return 1.0
        return fp32(1.0 - self.ema_decay)

    @property
    def has_no_main_params(self) -> bool:
        """True if bfloat16 parameters have no main params."""
        return self.store_param_remainders and self.param_remainder_bits == NO_REMAINDER.name

    @property
    def remainder_dtype(self) -> torch.dtype | None:
        """Dtype of the remainders; None if none are stored."""
        dtype: torch.dtype | None = REMAINDERS[self.param_remainder_bits].dtype
        return dtype


def moment_specs(name: str, shape: torch.Size, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Return shape and dtype of the tensors that store a moment, by key.

    The tensors are the moment's tensor (1-D bytes for 4-bit codes), and the scales of a block
    format.

    Args:
        name: name of the moment.
        shape: shape of the moment in FP32.
        dtype: dtype of the stored tensor.
    """
    form, numel = state_form(name, dtype), shape.numel()
    specs = {name: (torch.Size([packed_bytes(numel)]) if form.packed else shape, dtype)}
    if form.in_blocks:
        specs[scale_key(name)] = (torch.Size([blocks_of(numel)]), torch.float32)
    return specs


def full_precision(state: Mapping[str, Any], main: Tensor) -> State:
    """Return a slot's state in FP32, with the keys and shapes of FP32 state.

    Args:
        state: the stored state.
        main: the stepped main param.
    """
    full: State = {}
    for key, value in state.items():
        if key == REMAINDER:
            # The remainder may be on the device and the main param on the host, so copy the
            # remainder there.
            full[MASTER] = join(main, value.to(main.device))
        elif scale_key(key) in state or value.dtype == torch.bfloat16:
            full[key] = _decoded(state, key, main)
        elif not is_scale(key):
            full[key] = value
    return full


def unpacked(state: Mapping[str, Any], main: Tensor) -> State:
    """Return a slot's state with 4-bit moments as FP32 tensors in the main param's shape.

    These moments then have no scales, so every layout can read the state.
    """
    packed = {key for key, value in state.items() if is_packed(key, value.dtype)}
    scales = set(map(scale_key, packed))
    return {
        key: _decoded(state, key, main) if key in packed else value
        for key, value in state.items()
        if key not in scales
    }


def coded(
    key: str, stored: Tensor, scale: Tensor, shape: torch.Size, check: Callable[[Tensor], None]
) -> Coded:
    """Return an object that reads and writes the FP32 values of a moment in a block format.

    Args:
        key: name of the moment.
        stored: the stored tensor.
        scale: the scales.
        shape: shape of the moment in FP32.
        check: called with new values before the values are written.
    """
    second, numel = key == SECOND, shape.numel()
    return Coded(
        stored,
        scale,
        decode=lambda codes, scales: decode(codes.reshape(-1), scales, second, numel).view(shape),
        encode=lambda values, codes, scales: encode_again_(
            values.reshape(-1), codes.view(-1), scales, second
        ),
        check=check,
    )


def check_moment(label: str, key: str, values: Tensor) -> None:
    """Raise ValueError if a second moment has negative elements."""
    if key in (SECOND, MOMENT2) and values.is_floating_point() and bool((values < 0).any()):
        raise ValueError(
            f"{label}: has negative elements, but is a mean of squares; pass values from 0 on"
        )


def fitted(
    label: str, mine: Mapping[str, Any], main: Tensor, saved: Mapping[str, Any], convert: bool
) -> State:
    """Convert a slot's saved state to the storage formats of its live state.

    If the formats of main params differ, a saved remainder becomes a main param, or a saved main
    param replaces the remainder.

    Args:
        label: name of the slot in messages.
        mine: the live state.
        main: the live main param.
        saved: state of the same rule in any format.
        convert: True to convert even if bits are lost.

    Raises:
        ValueError: a value would lose bits, and ``convert`` is False.
    """
    if REMAINDER in saved:
        saved = {**saved, REMAINDER: narrowed(label, saved[REMAINDER])}
    # optimizer.state shows a moment as FP32 values, together with its scales: remove these scales.
    gone = {
        scale_key(key)
        for key, value in saved.items()
        if isinstance(value, Tensor) and value.dtype == torch.float32
    }
    saved = {key: value for key, value in saved.items() if key not in gone}
    result = {key: value for key, value in saved.items() if not is_scale(key)}
    for key, own in mine.items():
        theirs, scale = saved.get(key), scale_key(key)
        if key in (REMAINDER, "step") or not isinstance(theirs, Tensor):
            continue
        blocks, own_blocks = [
            each[scale].shape if scale in each else None for each in (saved, mine)
        ]
        if theirs.dtype == own.dtype and blocks == own_blocks:
            result |= {scale: saved[scale]} if scale in mine else {}
        elif shape_of(key, theirs, main) == shape_of(key, own, main) and _can_be_read(
            theirs, saved.get(scale), convert
        ):
            result |= _converted(f"{label}.{key}", key, mine, _decoded(saved, key, main), convert)
    if REMAINDER in saved and (
        REMAINDER not in mine or mine[REMAINDER].dtype != saved[REMAINDER].dtype
    ):
        remainder = result.pop(REMAINDER)
        result[MASTER] = joined(label, main, remainder)
        widths = (mine[REMAINDER].dtype if REMAINDER in mine else None, remainder.dtype)
        narrows = widths == (torch.int8, torch.int16)
        if narrows and not convert and bool((remainder & 0xFF).any()):
            # Refuse an int16 remainder with values that int8 loses. The later check of the joined
            # main param reads the present weights, so that check could miss the loss.
            raise ValueError(_more_bits(label))
    if MASTER in result and REMAINDER in mine:
        result.pop(REMAINDER, None)
        result[MASTER] = as_master(label, result[MASTER], convert)
        _check_splits(label, mine[REMAINDER], result[MASTER], convert)
    return _with_average(label, mine, main, result, convert)


def _with_average(
    label: str, mine: Mapping[str, Any], main: Tensor, state: State, convert: bool
) -> State:
    """Add an average to fitted state if the optimizer keeps averages, or remove a saved average if
    not.

    An added average starts from the main param.
    """
    if AVERAGE in state and AVERAGE not in mine:
        if not convert:
            raise ValueError(
                f"{label}: the state has an average of the main param, but this optimizer keeps no "
                "averages; set ema_decay, or load with convert=True, which drops the average"
            )
        return {key: value for key, value in state.items() if key != AVERAGE}
    if AVERAGE not in mine or AVERAGE in state:
        return state
    value = state.get(MASTER, main)
    if MASTER not in state and REMAINDER in state:
        value = joined(label, main, state[REMAINDER])
    return {**state, AVERAGE: value.to(mine[AVERAGE].dtype)}


def _can_be_read(saved: Tensor, scale: Any, convert: bool) -> bool:
    """True if a saved moment can be converted to FP32. If not, later checks refuse its dtype."""
    if saved.is_complex() or saved.is_meta:
        return False
    return (
        scale is not None or convert or (saved.is_floating_point() and saved.dtype != torch.float64)
    )


def shape_of(key: str, stored: Tensor, main: Tensor) -> torch.Size:
    """Return the shape of a stored moment after its conversion to FP32.

    4-bit codes are stored as 1-D bytes. If the number of bytes fits the main param, the result is
    the main param's shape; otherwise the shape of ``stored``.
    """
    fits = is_packed(key, stored.dtype) and stored.shape == (packed_bytes(main.numel()),)
    return main.shape if fits else stored.shape


def _decoded(state: Mapping[str, Any], key: str, main: Tensor) -> Tensor:
    """Return a saved moment in FP32.

    A saved whole tensor has one scale per block. A saved part of a tensor can start inside a block,
    so the part has one scale per element, with a last dimension of 1.
    """
    stored, scale = state[key], state.get(scale_key(key))
    shape = shape_of(key, stored, main)
    if scale is not None and scale.dim() > 1:
        values: Tensor = stored.float() * scale[..., 0]
        return values * values if key == SECOND else values
    numel = shape.numel()
    if scale is not None and scale.numel() != blocks_of(numel):
        raise ValueError(
            f"{key} of shape {tuple(stored.shape)} has {scale.numel()} scales for its blocks, "
            f"expected {blocks_of(numel)}, so it was saved in another layout; save with "
            "full_precision=True"
        )
    return decode(stored.reshape(-1), scale, key == SECOND, numel).view(shape)


def _converted(
    label: str, key: str, mine: Mapping[str, Any], value: Tensor, convert: bool
) -> State:
    fresh = {
        name: zeros(*spec, value.device)
        for name, spec in moment_specs(key, value.shape, mine[key].dtype).items()
    }
    encode_again_(value.reshape(-1), fresh[key].view(-1), fresh.get(scale_key(key)), key == SECOND)
    if not convert and not same_values(_decoded(fresh, key, value), value):
        dtype = mine[key].dtype
        words = "4-bit codes" if is_packed(key, dtype) else str(dtype)
        raise ValueError(
            f"{label}: has values that {words} cannot hold without loss; load with convert=True, "
            "or configure the dtype in which the state was saved. (torch's set_state_dict does not "
            "pass convert: load the model, then call optimizer.load_state_dict(..., convert=True))"
            + (_OTHER_BLOCKS if is_blocked(dtype) else "")
        )
    return fresh


_OTHER_BLOCKS = (
    ". (Each 256 elements of a rank's shard share a scale, so state from another sharding has "
    "other blocks, even with the same dtype)"
)


def joined(label: str, main: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 main param of a parameter and a saved remainder.

    Raises:
        ValueError: shape or dtype of parameter and remainder do not match.
    """
    if main.dtype != torch.bfloat16 or main.shape != remainder.shape:
        raise ValueError(
            f"{label}.{REMAINDER}: was saved for a bfloat16 parameter of shape "
            f"{tuple(remainder.shape)}, but the parameter is {main.dtype} of shape "
            f"{tuple(main.shape)}; save with full_precision=True"
        )
    return join(main, narrowed(label, remainder).to(main.device))


def narrowed(label: str, remainder: Any) -> Any:
    """Return a saved 32-bit remainder in 16 bits.

    torch's state dicts with process groups store remainders as int32.

    Raises:
        ValueError: a value needs more than 16 bits.
    """
    if not isinstance(remainder, Tensor) or remainder.dtype != torch.int32:
        return remainder
    narrow = remainder.short()
    if not torch.equal(narrow.int(), remainder):
        raise ValueError(f"{label}.{REMAINDER}: has values beyond 16 bits; load another checkpoint")
    return narrow


def _check_splits(label: str, remainder: Tensor, master: Tensor, convert: bool) -> None:
    if convert or remainder.dtype == torch.int16 or remainder.shape != master.shape:
        return
    param, rest = (
        torch.empty_like(master, dtype=dtype) for dtype in (torch.bfloat16, remainder.dtype)
    )
    split_(master, param, rest)
    if not same_values(join(param, rest), master):
        raise ValueError(_more_bits(label))


def _more_bits(label: str) -> str:
    return (
        f"{label}.{MASTER}: saved with more bits than a bfloat16 parameter and an 8-bit remainder "
        "hold; load with convert=True, or set param_remainder_bits=16"
    )
