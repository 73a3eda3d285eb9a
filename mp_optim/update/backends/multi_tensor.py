"""What apex and Transformer Engine share: kernels over lists of tensors that check little of what
they are handed.

A launch goes out only after everything the kernels take for granted was looked at here: what they
do otherwise is in docs/upstream-defects.md. Tensors are cut into pieces far below 2^31 elements,
empty ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mp_optim.slots.state_keys import AVERAGE
from mp_optim.update.backends.launch_kinds import current_device
from mp_optim.update.backends.reference import ReferenceBackend
from mp_optim.update.chunking import batches, mark_written, publish
from mp_optim.update.kernel_args import AdamScalars, SgdScalars, TensorLists
from mp_optim.update.stored_values import take_averages
from mp_optim.update.sums import combine_pieces, sum_of_squares

CHUNK = 2048 * 32
"""Elements that one block of threads works on."""

MOST_ELEMENTS = 2**31 - 1 - CHUNK
"""Elements of a tensor that the kernels' 32-bit indices reach."""

MOST_TENSORS = 1024
"""Tensors per call: Transformer Engine keeps a handle for each, of which there are some 20,000."""

KERNEL_DEVICE = "cuda"
"""Where the kernels run."""

READABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients and outputs that the kernels read and write."""


class Kind(NamedTuple):
    """What the tensors of one launch share."""

    grad: torch.dtype
    output: torch.dtype | None
    main: torch.dtype
    state: tuple[torch.dtype, ...]


def check_launch(
    name: str, lists: Sequence[Sequence[Tensor]], dtypes: Sequence[torch.dtype]
) -> None:
    """Refuse what a kernel would read or write wrongly without a word.

    Args:
        name: of the kernel. dtypes: of each list.

    Raises:
        ValueError: a list is empty, tensors are empty, too large, of different sizes, not
            contiguous, of another dtype, or not on one device of the kernels' kind.
    """
    if not lists or not lists[0] or len({len(tensors) for tensors in lists}) != 1:
        raise ValueError(
            f"{name}: lists of {[len(tensors) for tensors in lists]} tensors; they must be alike "
            "and "
            "not empty"
        )
    device, sizes = lists[0][0].device, [tensor.numel() for tensor in lists[0]]
    for tensors, dtype in zip(lists, dtypes, strict=True):
        for tensor, size in zip(tensors, sizes, strict=True):
            if tensor.device != device or device.type != KERNEL_DEVICE:
                raise ValueError(
                    f"{name}: a tensor on {tensor.device} in a launch on {device}; the kernels run "
                    "on "
                    f"{KERNEL_DEVICE}"
                )
            if tensor.dtype != dtype:
                raise ValueError(
                    f"{name}: a tensor is {tensor.dtype}, the kernel takes {dtype} there"
                )
            if (
                tensor.numel() != size
                or not 0 < size <= MOST_ELEMENTS
                or not tensor.is_contiguous()
            ):
                raise ValueError(
                    f"{name}: a tensor of {tensor.numel()} elements beside one of {size}, "
                    "contiguous: "
                    f"{tensor.is_contiguous()}; at most {MOST_ELEMENTS} elements are reached"
                )


def kinds_of(lists: TensorLists) -> list[tuple[Kind, list[int]]]:
    """The kinds that occur, and which tensors are of each; empty tensors are of none."""
    kinds: dict[Kind, list[int]] = {}
    for index, (main, grad, output) in enumerate(
        zip(lists.main, lists.grad, lists.output, strict=True)
    ):
        state = tuple(
            tensors[index].dtype
            for key, tensors in lists.state.items()
            if key != AVERAGE
        )
        if main.numel():
            kind = Kind(
                grad.dtype, None if output is None else output.dtype, main.dtype, state
            )
            kinds.setdefault(kind, []).append(index)
    return list(kinds.items())


class MultiTensorBackend(ReferenceBackend):
    """SGD and sums of squares, which both libraries do alike; ``reference`` does what no kernel of
    theirs can.

    Args:
        library: the module with the ``multi_tensor_*`` functions.
    """

    limits = ""
    """What else goes to ``reference``, for people to read."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def takes(self, lists: TensorLists, kind: Kind) -> bool:
        """Whether there are kernels for a kind; here: FP32 state, and gradients and outputs of at
        most 32 bits."""
        return (
            lists.noise is None
            and kind.grad in READABLE
            and (kind.output is None or kind.output in READABLE)
            and {kind.main, *kind.state} == {torch.float32}
        )

    def split(self, lists: TensorLists) -> Iterator[tuple[Kind | None, TensorLists]]:
        """Parts of the lists that are of one kind each; None for what goes to ``reference``."""
        for kind, indices in kinds_of(lists):
            part = lists if len(indices) == len(lists.main) else lists.take(indices)
            yield (kind if self.takes(part, kind) else None), part

    def launch(
        self,
        name: str,
        lists: Sequence[Sequence[Tensor]],
        dtypes: Sequence[torch.dtype],
        *arguments: Any,
    ) -> Any:
        """Call a kernel with a flag of its own, which no earlier launch can have set."""
        check_launch(f"{self.name}: {name}", lists, dtypes)
        device = lists[0][0].device
        with current_device(device):
            flag = torch.zeros(1, dtype=torch.int32, device=device)
            return getattr(self.library, name)(
                CHUNK, flag, [list(tensors) for tensors in lists], *arguments
            )

    def scaled(self, grads: Sequence[Tensor], multiplier: float) -> list[Tensor]:
        """FP32(g) * multiplier in memory of its own, of one batch's size."""
        fresh = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        self.launch(
            "multi_tensor_scale",
            [grads, fresh],
            [grads[0].dtype, torch.float32],
            multiplier,
        )
        return fresh

    def adam(self, lists: TensorLists, scalars: AdamScalars, multiplier: float) -> None:
        for kind, part in self.split(lists):
            if kind is None:
                super().adam(part, scalars, multiplier)
                continue
            for batch in batches(part, MOST_TENSORS):
                self.adam_launch(kind, batch.lists, scalars, multiplier)
                take_averages(batch.lists)
            mark_written(part)

    def adam_launch(
        self, kind: Kind, batch: TensorLists, scalars: AdamScalars, multiplier: float
    ) -> None:
        """One batch of one kind."""
        raise NotImplementedError

    def sgd(self, lists: TensorLists, scalars: SgdScalars, multiplier: float) -> None:
        for kind, part in self.split(lists):
            if kind is None:
                super().sgd(part, scalars, multiplier)
                continue
            for batch in batches(part, MOST_TENSORS):
                self._sgd_launch(kind, batch.lists, scalars, multiplier)
            mark_written(part)

    def _sgd_launch(
        self, kind: Kind, batch: TensorLists, scalars: SgdScalars, multiplier: float
    ) -> None:
        """The kernel reads a buffer even without momentum, but writes none then: any list will
        do."""
        grads = (
            batch.grad
            if kind.grad == torch.float32
            else self.scaled(batch.grad, multiplier)
        )
        buffers = batch.state.get("momentum_buffer", grads)
        self.launch(
            "multi_tensor_sgd",
            [grads, batch.main, buffers],
            [torch.float32] * 3,
            scalars.decay,
            scalars.momentum,
            1.0 - scalars.one_minus_dampening,
            scalars.lr,
            bool(scalars.nesterov),
            bool(scalars.first),
            False,
            multiplier if grads is batch.grad else 1.0,
        )
        publish(batch)
        take_averages(batch)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """FP32 norms of pieces, added up in FP64. What overflows FP32 is summed by ``reference``:
        only an inf or nan among the values may make a sum that is not finite."""
        if not tensors or any(tensor.dtype not in READABLE for tensor in tensors):
            return sum_of_squares(tensors)
        owners, pieces = _flat_pieces(tensors)
        squares = torch.zeros(
            len(pieces), 1, dtype=torch.float64, device=tensors[0].device
        )
        for dtype in dict.fromkeys(piece.dtype for piece in pieces):
            indices = [
                index for index, piece in enumerate(pieces) if piece.dtype == dtype
            ]
            for start in range(0, len(indices), MOST_TENSORS):
                together = indices[start : start + MOST_TENSORS]
                norms = self.launch(
                    "multi_tensor_l2norm",
                    [[pieces[i] for i in together]],
                    [dtype],
                    True,
                )[1]
                squares[torch.tensor(together, device=squares.device), 0] = (
                    norms.double().square()
                )
        sums = combine_pieces(owners, squares, len(tensors)).squeeze(1)
        if not bool(sums.isfinite().all()):
            for index in torch.nonzero(~sums.isfinite()).flatten().tolist():
                sums[index] = sum_of_squares([tensors[index]])[0]
        return sums


def _flat_pieces(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Contiguous flat pieces, and which tensor each is of."""
    flat = [tensor.contiguous() for tensor in tensors]
    cut = list(batches(TensorLists(flat, flat, {}, [None] * len(flat))))
    pairs = sorted(
        (
            (owner, at, main)
            for at, batch in enumerate(cut)
            for owner, main in zip(batch.owners, batch.lists.main, strict=True)
        ),
        key=lambda pair: pair[:2],
    )
    owners = [owner for owner, _, _ in pairs]
    return owners, [main for _, _, main in pairs]
