"""Cut the launches of a step into windows: main params and state that are in memory at the same
time.

A window is filled in the order of the launches. A tensor that fits into a window is never cut. A
larger tensor is cut at blocks of 256 elements if its rule allows cuts, and at multiples of these
blocks if its state is in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from mp_optim.config.state_forms import BLOCK, packed_bytes
from mp_optim.core import CachedTensorList
from mp_optim.core.slot_state import is_scale
from mp_optim.host.host_memory import ALIGNMENT, TensorSpec, aligned_bytes
from mp_optim.kernels.chunking import part_of_state
from mp_optim.kernels.codecs import is_packed
from mp_optim.kernels.kernel_args import MAIN, TensorLists
from mp_optim.rules.rule import Launch

GRAD, OUTPUT = "grad", "output"
IN_FLIGHT = 3
"""Windows on the device: one is copied up, one is stepped, and one is copied down."""
SMALLEST_WINDOW = 4096
"""Smallest size of a window in bytes: 256 elements with state of any format fit into this size."""

Tensors = Mapping[str, Tensor]
"""Tensors of some elements by key: the main param under ``MAIN``, and state under its keys. A
gradient and an output that are copied with them are under ``GRAD`` and ``OUTPUT``."""
Along = Callable[[Launch, int], Tensors]
"""Function from a launch and the index of a tensor to the gradient and output that are copied
with the window."""
InPlace = Callable[[Launch, int], bool]
"""Function from a launch and the index of a tensor to True if the main param is stepped in
place, outside of windows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of one tensor of a launch.

    Attributes:
        launch: index of the launch in the step.
        index: index of the tensor in the launch's lists.
        start: first element.
        count: number of elements.
        is_whole: True if the piece has all elements of the tensor.
        held: state of these elements, and their main param unless it is stepped in place.
        along: gradient and output of these elements, if they are copied with the window.
        num_bytes: bytes in the window.
    """

    launch: int
    index: int
    start: int
    count: int
    is_whole: bool
    held: Tensors
    along: Tensors
    num_bytes: int


Window = list[Piece]


@dataclass(frozen=True)
class WindowForm:
    """The layout of tensors in a window, and the boundaries at which tensors are cut.

    Attributes:
        unit: alignment of main params and state in bytes: a cache line in memory, or a block in a
            file, so that neighbours are one transfer.
    """

    unit: int = ALIGNMENT

    def forms_bytes(self, forms: Iterable[TensorSpec]) -> int:
        """Return the bytes of tensors with these shapes and dtypes."""
        sizes = (shape.numel() * dtype.itemsize for shape, dtype in forms)
        return sum(-(-size // self.unit) * self.unit for size in sizes)

    def bytes_of(self, held: Tensors, along: Tensors) -> int:
        """Return the bytes of these tensors in a window: state and main params, and gradients
        and outputs."""
        size = self.forms_bytes((each.shape, each.dtype) for each in held.values())
        return size + sum(aligned_bytes(each.numel(), each.dtype) for each in along.values())

    def cuts(self, dtypes: Mapping[str, torch.dtype]) -> tuple[int, int]:
        """Return the number of elements in the smallest piece of a tensor, and the bytes of this
        piece. A tensor is cut only at multiples of this number.

        In a file a piece fills whole blocks for each dtype. The dtypes may be empty for a parameter
        that is stepped in place.
        """
        sizes = [_block_bytes(key, dtype) for key, dtype in dtypes.items()]
        count = max(1, self.unit // min(sizes, default=self.unit)) if self.unit > ALIGNMENT else 1
        return count * BLOCK, count * sum(sizes)

    def elements_that_fit(self, held: Tensors, along: Tensors, most: int) -> int:
        """Return the largest number of elements of a tensor that fit into ``most`` bytes. The
        number is a multiple of the number in :meth:`cuts`, and leaves space for the alignment of
        each tensor."""
        elements, num_bytes = self.cuts({key: each.dtype for key, each in held.items()})
        num_bytes += sum(elements * each.itemsize for each in along.values())
        ends = self.unit * (len(held) + len(along)) if self.unit == ALIGNMENT else 0
        return max(1, (most - ends) // num_bytes) * elements


def _block_bytes(key: str, dtype: torch.dtype) -> int:
    """Return the bytes of 256 elements of the state tensor ``key``."""
    if is_scale(key):
        return dtype.itemsize
    return packed_bytes(BLOCK) if is_packed(key, dtype) else dtype.itemsize * BLOCK


def cut_windows(
    launches: Sequence[Launch],
    form: WindowForm,
    most: int,
    may_cut: Sequence[bool],
    along: Along,
    in_place: InPlace = lambda *_: False,
) -> list[Window]:
    """Return the windows of a step, of at most ``most`` bytes each.

    Args:
        launches: the launches of the step.
        form: layout of the windows.
        most: largest bytes of a window.
        may_cut: for each launch, True if some elements of a tensor can be stepped alone.
        along: returns the gradient and output that are copied with a tensor's window.
        in_place: returns True if a tensor's main param is stepped in place.

    Raises:
        ValueError: a tensor that cannot be cut is larger than ``most``; the message has its bytes.
    """
    windows: list[Window] = []
    filled = 0
    for piece in _pieces(launches, form, most, may_cut, along, in_place):
        if not windows or filled + piece.num_bytes > most:
            windows.append([])
            filled = 0
        windows[-1].append(piece)
        filled += piece.num_bytes
    return windows


def _pieces(
    launches: Sequence[Launch],
    form: WindowForm,
    most: int,
    may_cut: Sequence[bool],
    along: Along,
    in_place: InPlace,
) -> Iterator[Piece]:
    for launch, planned in enumerate(launches):
        for index, main in enumerate(planned.lists.main):
            held = {key: tensors[index] for key, tensors in planned.lists.state.items()}
            if not in_place(planned, index):
                held = {MAIN: main, **held}
            extra = along(planned, index)
            size = form.bytes_of(held, extra)
            if size <= most:
                yield Piece(launch, index, 0, main.numel(), True, held, extra, size)
                continue
            if not may_cut[launch]:
                raise ValueError(
                    f"stream_window_bytes={most}: a parameter of {tuple(main.shape)}, which its "
                    f"rule steps only as a whole, needs {size} bytes; set "
                    f"stream_window_bytes={size} or more. No parameter was stepped"
                )
            limit = form.elements_that_fit(held, extra, most)
            for start in range(0, main.numel(), limit):
                count = min(limit, main.numel() - start)
                parts = cut_all(held, start, count), cut_all(extra, start, count)
                size = form.bytes_of(*parts)
                if size > most:
                    raise ValueError(
                        f"stream_window_bytes={most}: the smallest piece of a parameter with a "
                        f"gradient in {extra[GRAD].dtype} needs {size} bytes; set "
                        f"stream_window_bytes={size} or more. No parameter was stepped"
                    )
                yield Piece(launch, index, start, count, False, *parts, size)


def cut_all(tensors: Tensors, start: int, count: int) -> Tensors:
    """Return views of some elements of each tensor."""
    return {key: part_of_state(key, each, start, count) for key, each in tensors.items()}


def launches_of(
    launches: Sequence[Launch], window: Window, resident: Sequence[Tensors]
) -> Iterator[Launch]:
    """Yield the launches of a window.

    Args:
        launches: the launches of the step.
        window: pieces of the window.
        resident: main param, state, gradient and output of each piece, on the stepping device.
    """
    pairs = zip(window, resident, strict=True)
    for launch, run in groupby(pairs, key=lambda pair: pair[0].launch):
        yield _launch_of(launches[launch], list(run))


def _launch_of(planned: Launch, members: Sequence[tuple[Piece, Tensors]]) -> Launch:
    pieces = [piece for piece, _ in members]
    lists, indices = planned.lists, [piece.index for piece in pieces]
    grads = CachedTensorList(
        _or_part(here.get(GRAD), lists.grad[p.index], p) for p, here in members
    )
    outputs = [
        None if (output := lists.output[p.index]) is None else _or_part(here.get(OUTPUT), output, p)
        for p, here in members
    ]
    mains = CachedTensorList(
        _or_part(here.get(MAIN), lists.main[p.index], p) for p, here in members
    )
    state = {key: [tensors[key] for _, tensors in members] for key in lists.state}
    noise = lists.noise and [
        replace(lists.noise[p.index], start=lists.noise[p.index].start + p.start) for p in pieces
    ]
    return planned._replace(
        positions=[planned.positions[index] for index in indices],
        regions=[planned.regions[index] for index in indices],
        device=mains[0].device,
        updates=planned.updates.take(indices),
        mains=mains,
        outputs=outputs,
        lists=TensorLists(
            mains,
            grads,
            state,
            outputs,
            noise=noise,
            average_weight=lists.average_weight,
            follows=lists.follows and not any(OUTPUT in here for _, here in members),
        ),
        firsts=[piece.start for piece in pieces],
    )


def _or_part(came: Tensor | None, tensor: Tensor, piece: Piece) -> Tensor:
    """Return the copied tensor; without a copy, the piece's elements of the tensor itself."""
    if came is not None:
        return came
    return tensor if piece.is_whole else part_of_state(MAIN, tensor, piece.start, piece.count)


def view_of(memory: Tensor, start: int, form: TensorSpec) -> Tensor:
    """Return a contiguous tensor that shares 1-D uint8 memory.

    Args:
        memory: 1-D uint8 tensor.
        start: first byte of the tensor in the memory.
        form: shape and dtype of the tensor.
    """
    shape, dtype = form
    size = shape.numel() * dtype.itemsize
    return memory[start : start + size].view(dtype).view(shape)
