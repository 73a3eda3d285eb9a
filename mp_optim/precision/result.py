"""What ``step`` reports, read from the device only when it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, overload

_Values = tuple[bool, float | None, int | None]
_Known = _Values | tuple[bool, float | None, int | None, str]


class StepResult:
    """What a step did; unpacks as Megatron's tuple ``(success, grad_norm, num_zeros_in_grad)``, and
    is equal to it.

    After a step that the host did not wait for, the first look at any value waits for the device;
    :attr:`is_known` says whether it would. Immutable; a pickled one holds values.

    Attributes:
        success: whether parameters were updated.
        grad_norm: global L2 norm of the unscaled gradients before clipping; None after an overflow.
        num_zeros_in_grad: zero gradient elements if ``log_num_zeros_in_grad``, else None.
        reason: why the step was skipped, in words; empty for one that was taken. Not in the tuple.
    """

    __slots__ = ("_read", "_reason", "_values")
    _values: _Values | None
    _reason: str
    _read: Callable[[], _Known] | None

    def __init__(
        self,
        success: bool,
        grad_norm: float | None,
        num_zeros_in_grad: int | None,
        reason: str = "",
    ) -> None:
        object.__setattr__(self, "_values", (success, grad_norm, num_zeros_in_grad))
        object.__setattr__(self, "_reason", reason)
        object.__setattr__(self, "_read", None)

    @classmethod
    def later(cls, read: Callable[[], _Known]) -> StepResult:
        """A result that asks ``read`` for its values, once, when it is looked at."""
        result = cls.__new__(cls)
        object.__setattr__(result, "_values", None)
        object.__setattr__(result, "_read", read)
        return result

    @property
    def is_known(self) -> bool:
        """Whether looking does not wait for the device."""
        return self._values is not None

    def _tuple(self) -> _Values:
        if self._values is None:
            assert self._read is not None
            StepResult.__init__(self, *self._read())
        assert self._values is not None
        return self._values

    @property
    def success(self) -> bool:
        return self._tuple()[0]

    @property
    def grad_norm(self) -> float | None:
        return self._tuple()[1]

    @property
    def num_zeros_in_grad(self) -> int | None:
        return self._tuple()[2]

    @property
    def reason(self) -> str:
        self._tuple()
        return self._reason

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tuple())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._tuple()[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StepResult):
            return self._tuple() == other._tuple()
        return self._tuple() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._tuple())

    def __repr__(self) -> str:
        success, norm, zeros = self._tuple()
        why = f", reason={self._reason!r}" if self._reason else ""
        values = f"success={success!r}, grad_norm={norm!r}, num_zeros_in_grad={zeros!r}"
        return f"StepResult({values}{why})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, (*self._tuple(), self._reason)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a StepResult cannot be changed ({name}={value!r})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a StepResult cannot be changed (del {name})")
