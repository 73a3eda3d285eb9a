"""Whether loaded remainders lie beside the parameters they were saved with.

A remainder is the lower bits of a main param and means nothing without the upper ones, which are
the parameter. Weights may be loaded before or after the optimizer's state, so that is decided when
a remainder is first used, not when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mp_optim.slots import Slot
from mp_optim.slots.state_dict import names_in_words
from mp_optim.update.checksums import checksums_of
from mp_optim.update.codecs import split_


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device hold equal numbers, nan among them."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def stands_for(main: Tensor, param: Tensor) -> bool:
    """Whether a parameter is its FP32 main param, rounded: to nearest even; or with halves away
    from zero, as it is beside a remainder."""
    if same_values(main.to(device=param.device, dtype=param.dtype), param):
        return True
    if param.dtype != torch.bfloat16 or main.dtype != torch.float32:
        return False
    away = torch.empty_like(param, memory_format=torch.contiguous_format)
    split_(main.to(param.device), away, torch.empty_like(away, dtype=torch.int16))
    return bool(
        (
            (away == param) | (main.to(param) == param) | (away.isnan() & param.isnan())
        ).all()
    )


class Agreement:
    """What is not yet certain about loaded slots.

    Attributes:
        expected: checksums of the parameters that the remainders of these slots belong to.
        written: slots whose parameter took another value when their main param was loaded.
    """

    def __init__(self) -> None:
        self.expected: dict[Slot, int] = {}
        self.written: set[Slot] = set()

    def forget(self, slot: Slot) -> None:
        """The slot was loaded anew."""
        self.expected.pop(slot, None)
        self.written.discard(slot)

    def check_expected(
        self,
        slot: Slot | None,
        param_of: Callable[[Slot], Tensor],
        name_of: Callable[[Slot], str],
    ) -> None:
        """Raise unless what is expected of a slot, or of all, is so; what was found so once is not
        asked again.

        Raises:
            ValueError: naming the parameters that have other values.
        """
        some = {slot: self.expected[slot]} if slot in self.expected else {}
        chosen = self.expected if slot is None else some
        self.check(chosen.items(), param_of, name_of)
        for proven in list(chosen):
            del self.expected[proven]

    @staticmethod
    def check(
        expected: Iterable[tuple[Slot, int]],
        param_of: Callable[[Slot], Tensor],
        name_of: Callable[[Slot], str],
    ) -> None:
        """Raise unless parameters have the checksums they are expected to have.

        Raises:
            ValueError: naming those that have not.
        """
        pairs = list(expected)
        sums = checksums_of([param_of(slot) for slot, _ in pairs])
        others = [
            name_of(slot)
            for (slot, wanted), checksum in zip(pairs, sums, strict=True)
            if checksum != wanted
        ]
        if others:
            raise ValueError(
                f"{len(others)} parameters are not the ones that their loaded remainders belong "
                f"to: {names_in_words(others)}. Load the model's weights that were saved with this "
                "state, all of them; or, to go on from the weights that are there, without the "
                "extra bits, load with convert=True or call reload_model_params()"
            )
