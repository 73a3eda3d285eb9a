"""Storage of a slot's state: its tensors by key, their FP32 values, and conversion from FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.combinations import check_state_forms
from mp_optim.config.fields import check_field
from mp_optim.config.rules import moment_of
from mp_optim.config.state_forms import CODED, NO_REMAINDER, REMAINDERS, blocks_of, packed_bytes
from mp_optim.core.shown_copies import Coded
from mp_optim.core.slot_state import (
    AVERAGE,
    MASTER,
    MOMENT2,
    REMAINDER,
    SECOND,
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
    stored_dtype,
)
from mp_optim.kernels.kernel_args import fp32


@dataclass(frozen=True)
class StatePrecision:
    """The forms of a rule's state.

    Attributes:
        exp_avg_dtype: dtype of the first moment or momentum: float32, bfloat16, float16, uint8 or
            uint4 (see ``codecs``).
        exp_avg_sq_dtype: dtype of the second moment; all of these except uint4.
        fp32_state_below: number of elements from which on moments are in 8 or 4 bits; smaller
            parameters have FP32 moments.
        store_param_remainders: True to step bfloat16 parameters in place, with a remainder that
            completes them to FP32.
        param_remainder_bits: 16 for all of FP32, 8 for its upper 24 bits, 0 for the parameter
            alone, rounded stochastically.
        stochastic_rounding: True for stochastic rounding of bfloat16, 8-bit and 4-bit state.
        seed: seed of the random bits, 32 bits.
        ema_decay: decay of the averages of main params; None keeps none.
        ema_dtype: dtype of these averages, float32 or bfloat16.

    Raises:
        ValueError: a value is not supported, naming it.
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
            raise ValueError(f"seed={self.seed!r}: must be in [0, 2**32)")

    def is_small(self, elements: int) -> bool:
        """True if a parameter of ``elements`` elements (of the whole parameter) keeps FP32
        moments."""
        return elements < self.fp32_state_below

    def stored_dtype(self, moment: str, is_small: bool) -> torch.dtype:
        """Return the dtype of the stored tensor of a moment."""
        source = moment_of(moment).dtype_field
        asked = torch.float32 if source is None else getattr(self, source)
        if is_small and asked in CODED:
            asked = torch.float32
        return stored_dtype(moment, asked)

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the main param of a parameter."""
        return dtype if dtype == torch.bfloat16 and self.store_param_remainders else torch.float32

    def average_weight(self, step: int) -> float:
        """Return the weight of a new main param in its average at step ``step`` >= 1, an FP32
        number."""
        if step == 1 or self.ema_decay is None:
            return 1.0
        return fp32(1.0 - self.ema_decay)

    @property
    def has_no_main_params(self) -> bool:
        """True if bfloat16 parameters have no main params."""
        return self.store_param_remainders and self.param_remainder_bits == NO_REMAINDER.name

    @property
    def remainder_dtype(self) -> torch.dtype | None:
        """Dtype of the remainders; None without remainders."""
        dtype: torch.dtype | None = REMAINDERS[self.param_remainder_bits].dtype
        return dtype


def moment_specs(name: str, shape: torch.Size, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Return shape and dtype of the tensors that store a moment.

    They are a tensor of the moment's shape, or bytes with 4-bit codes; and its scales, if it has
    some.
    """
    form, numel = state_form(name, dtype), shape.numel()
    specs = {name: (torch.Size([packed_bytes(numel)]) if form.packed else shape, dtype)}
    if form.in_blocks:
        specs[scale_key(name)] = (torch.Size([blocks_of(numel)]), torch.float32)
    return specs


def full_precision(state: Mapping[str, Any], main: Tensor) -> State:
    """Return a slot's state in FP32, under the keys and in the shapes of FP32 state.

    Args:
        main: the main param as it is stepped.
    """
    full: State = {}
    for key, value in state.items():
        if key == REMAINDER:
            full[MASTER] = join(main, value.to(main.device))  # The main param may be offloaded.
        elif scale_key(key) in state or value.dtype == torch.bfloat16:
            full[key] = _decoded(state, key, main)
        elif not is_scale(key):
            full[key] = value
    return full


def unpacked(state: Mapping[str, Any], main: Tensor) -> State:
    """Return a slot's state with 4-bit moments as FP32 tensors of the main param's shape.

    They have no scales, so any layout can read exported state.
    """
    packed = {
        key
        for key, value in state.items()
        if isinstance(value, Tensor) and is_packed(key, value.dtype)
    }
    scales = set(map(scale_key, packed))
    return {
        key: _decoded(state, key, main) if key in packed else value
        for key, value in state.items()
        if key not in scales
    }


def coded(
    key: str, stored: Tensor, scale: Tensor, shape: torch.Size, check: Callable[[Tensor], None]
) -> Coded:
    """Return a moment in a block format, as an object to read and write its FP32 values."""
    second = key == SECOND

    def read(stored: Tensor, scale: Tensor) -> Tensor:
        return decode(stored.reshape(-1), scale, second, shape.numel()).view(shape)

    def write(values: Tensor, stored: Tensor, scale: Tensor) -> None:
        encode_again_(values.reshape(-1), stored.view(-1), scale, second)

    return Coded(stored, scale, read, write, check)


def check_moment(label: str, key: str, values: Tensor) -> None:
    """Raise ValueError if a mean of squares has negative elements."""
    if key in (SECOND, MOMENT2) and values.is_floating_point() and bool((values < 0).any()):
        raise ValueError(f"{label}: has negative elements; it is a mean of squares")


def fitted(
    label: str, mine: Mapping[str, Any], main: Tensor, saved: Mapping[str, Any], convert: bool
) -> State:
    """Return saved state in the storage format of ``mine``.

    A remainder becomes a main param if the formats differ, and a saved main param replaces a
    remainder.

    Args:
        label: name of the slot in messages.
        mine: the live state.
        main: the live main param.
        saved: state in any format of the same rule.
        convert: True to convert also if bits are lost.

    Raises:
        ValueError: a value would lose bits.
    """
    if REMAINDER in saved:
        saved = {**saved, REMAINDER: narrowed(label, saved[REMAINDER])}
    saved = _without_scales_of_values(saved)
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
            raise ValueError(_more_bits(label))  # refused for any current weights
    if MASTER in result and REMAINDER in mine:
        result.pop(REMAINDER, None)
        result[MASTER] = as_master(label, result[MASTER], convert)
        _check_splits(label, mine[REMAINDER], result[MASTER], convert)
    return _with_average(label, mine, main, result, convert)


def _without_scales_of_values(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state without the scales of tensors that are FP32. ``optimizer.state`` shows
    both."""
    gone = {
        scale_key(key)
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dtype == torch.float32 and scale_key(key) in state
    }
    return {key: value for key, value in state.items() if key not in gone} if gone else state


def _with_average(
    label: str, mine: Mapping[str, Any], main: Tensor, state: State, convert: bool
) -> State:
    """Return fitted state with an average if the optimizer keeps one, else without.

    The average starts from the main param if none was saved.
    """
    if AVERAGE in state and AVERAGE not in mine:
        if not convert:
            raise ValueError(
                f"{label}: the state has an average of the main param, but this optimizer keeps "
                "none; set ema_decay, or load with convert=True, which drops it"
            )
        return {key: value for key, value in state.items() if key != AVERAGE}
    if AVERAGE not in mine or AVERAGE in state:
        return state
    value = state.get(MASTER, main)
    if MASTER not in state and REMAINDER in state:
        value = joined(label, main, state[REMAINDER])
    return {**state, AVERAGE: value.to(mine[AVERAGE].dtype)}


def _can_be_read(saved: Tensor, scale: Any, convert: bool) -> bool:
    """True if a saved moment can be converted to FP32. Another one is refused in its saved form."""
    if saved.is_complex() or saved.is_meta:
        return False
    return (
        scale is not None or convert or (saved.is_floating_point() and saved.dtype != torch.float64)
    )


def shape_of(key: str, stored: Tensor, main: Tensor) -> torch.Size:
    """Return the shape of a stored moment in FP32.

    It is the main param's shape if the number of bytes is that of its 4-bit codes.
    """
    fits = is_packed(key, stored.dtype) and stored.shape == (packed_bytes(main.numel()),)
    return main.shape if fits else stored.shape


def _decoded(state: Mapping[str, Any], key: str, main: Tensor) -> Tensor:
    """Return FP32 values of a saved moment of a main param.

    The moment has a scale for each block. A part of a larger tensor, whose blocks are those of that
    tensor, has a scale for each element, in a last dimension of 1.
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
            f"expected {blocks_of(numel)}; was it saved in another layout? Save with "
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
            "or configure this state as it was saved. (torch's set_state_dict has no such "
            "argument: call optimizer.load_state_dict(..., convert=True), after the model's)"
            + (_OTHER_BLOCKS if is_blocked(dtype) else "")
        )
    return fresh


_OTHER_BLOCKS = (
    ". (Each 256 elements of a rank's shard share a scale. State that was saved in this form, too, "
    "comes from another sharding)"
)


def joined(label: str, main: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 main param of a parameter and a saved remainder.

    Raises:
        ValueError: their shapes or dtypes do not match.
    """
    if main.dtype != torch.bfloat16 or main.shape != remainder.shape:
        raise ValueError(
            f"{label}.{REMAINDER}: saved {tuple(remainder.shape)} for a bfloat16 parameter; this "
            f"one is {main.dtype} {tuple(main.shape)}. Save with full_precision=True instead"
        )
    return join(main, narrowed(label, remainder).to(main.device))


def narrowed(label: str, remainder: Any) -> Any:
    """Return a saved 32-bit remainder, as state dicts with process groups have it, in 16 bits.

    Raises:
        ValueError: it has more than 16 significant bits.
    """
    if not isinstance(remainder, Tensor) or remainder.dtype != torch.int32:
        return remainder
    narrow = remainder.short()
    if not torch.equal(narrow.int(), remainder):
        raise ValueError(f"{label}.{REMAINDER}: has values beyond 16 bits")
    return narrow


def _check_splits(label: str, remainder: Tensor, master: Tensor, convert: bool) -> None:
    if convert or remainder.dtype == torch.int16 or remainder.shape != master.shape:
        return
    param, rest = (
        torch.empty_like(master, dtype=torch.bfloat16),
        torch.empty_like(master, dtype=remainder.dtype),
    )
    split_(master, param, rest)
    if not same_values(join(param, rest), master):
        raise ValueError(_more_bits(label))


def _more_bits(label: str) -> str:
    return (
        f"{label}.{MASTER}: saved with more bits than a bfloat16 parameter and an 8-bit remainder "
        "hold; load with convert=True, or set param_remainder_bits=16"
    )


def stepped_without(label: str, moment: str, decided: str) -> ValueError:
    """Return the error for a stepped slot without a moment, which depends on earlier gradients."""
    return ValueError(
        f"{label} was stepped without {moment}, which {decided} needs; set back what made it "
        "needless, or give the group the new value from its first step on; nothing was stepped"
    )
