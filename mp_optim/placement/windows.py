"""Windows: which parts of which launches are where they are stepped at a time. Plans, made of sizes
alone.

A window is filled in the order of the launches. A tensor that fits into one is never cut; a larger
one is cut at blocks of 256 elements, if its rule allows that, and where its state lies in a file at
blocks of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from mp_optim.checkpoint.blocks import BLOCK
from mp_optim.process.host_memory import ALIGNMENT, Form, aligned_bytes
from mp_optim.slots import CachedTensorList
from mp_optim.slots.state_keys import is_scale
from mp_optim.update.chunking import part_of_state
from mp_optim.update.codecs import is_packed, packed_bytes
from mp_optim.update.kernel_args import MAIN, TensorLists
from mp_optim.update.launches import PlannedLaunch

GRAD, OUTPUT = "grad", "output"
IN_FLIGHT = 3
"""Windows on the device: one comes up, one is stepped, one goes down."""
SMALLEST_WINDOW = 4096
"""Bytes in which a block of 256 elements of every form of state has room."""

Tensors = Mapping[str, Tensor]
"""A main param, by ``MAIN``, and its state, by key."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of one tensor of a launch.

    Attributes:
        launch, index: which launch of a step, and which tensor of its lists.
        start, count: which elements; all of them if ``is_whole``.
        held: main param and state of these elements, where they are kept.
        beside: their gradient and output, by ``GRAD`` and ``OUTPUT``, if those come along.
        num_bytes: what it takes in a window.
    """

    launch: int
    index: int
    start: int
    count: int
    is_whole: bool
    held: Tensors
    beside: Tensors
    num_bytes: int


Window = list[Piece]


class WindowForm:
    """What pieces are made of, and the bytes that they take: main params and state, side by
    side."""

    def forms_bytes(self, forms: Iterable[Form]) -> int:
        """What main params and state of these forms take."""
        return sum(aligned_bytes(shape.numel(), dtype) for shape, dtype in forms)

    def beside(self, lists: TensorLists, index: int) -> Tensors:
        """What comes along with a tensor of a launch."""
        return {}

    def elements_that_fit(self, held: Tensors, beside: Tensors, most: int) -> int:
        """Of one tensor: whole blocks of 256 elements, with room for the tensors' ends."""
        of_block = sum(block_bytes(key, each.dtype) for key, each in held.items())
        return max(1, (most - ALIGNMENT * len(held)) // of_block) * BLOCK

    def bytes_of(self, held: Tensors, beside: Tensors) -> int:
        """What they take in a window."""
        return self.forms_bytes((each.shape, each.dtype) for each in held.values())


def block_bytes(key: str, dtype: torch.dtype) -> int:
    """What 256 elements take in a tensor of this name."""
    if is_scale(key):
        return dtype.itemsize
    return packed_bytes(BLOCK) if is_packed(key, dtype) else dtype.itemsize * BLOCK


def ring_sizes(total: int, whole: int, most: int) -> list[int]:
    """Bytes of each window of the ring: at most ``most``, and together about ``total`` if that is
    less.

    Args:
        total: bytes of all main params and state.
        whole: bytes of the largest of those that may not be cut.
    """
    if total <= most:
        return [total]
    third = -(-total // (IN_FLIGHT * ALIGNMENT)) * ALIGNMENT
    return [min(most, max(third, whole, SMALLEST_WINDOW))] * IN_FLIGHT


def cut_windows(
    launches: Sequence[PlannedLaunch],
    form: WindowForm,
    most: int,
    may_cut: Sequence[bool],
) -> list[Window]:
    """The windows of a step, of at most ``most`` bytes each.

    Args:
        may_cut: for each launch, whether a part of a tensor can be stepped by itself.

    Raises:
        ValueError: a tensor that may not be cut is larger than that, naming its bytes.
    """
    windows: list[Window] = []
    filled = 0
    for piece in _pieces(launches, form, most, may_cut):
        if not windows or filled + piece.num_bytes > most:
            windows.append([])
            filled = 0
        windows[-1].append(piece)
        filled += piece.num_bytes
    return windows


def _pieces(
    launches: Sequence[PlannedLaunch],
    form: WindowForm,
    most: int,
    may_cut: Sequence[bool],
) -> Iterator[Piece]:
    for launch, planned in enumerate(launches):
        for index, main in enumerate(planned.lists.main):
            held, beside = (
                _held(planned.lists, index),
                form.beside(planned.lists, index),
            )
            size = form.bytes_of(held, beside)
            if size <= most:
                yield Piece(launch, index, 0, main.numel(), True, held, beside, size)
                continue
            if not may_cut[launch]:
                raise ValueError(
                    f"a whole parameter of {size} bytes does not fit into "
                    f"stream_window_bytes={most}; nothing was stepped"
                )
            limit = form.elements_that_fit(held, beside, most)
            for start in range(0, main.numel(), limit):
                count = min(limit, main.numel() - start)
                parts = _all_cut(held, start, count), _all_cut(beside, start, count)
                size = form.bytes_of(*parts)
                if size > most:
                    raise ValueError(
                        f"a part of {size} bytes, a gradient in {beside[GRAD].dtype} among them, "
                        f"does not fit into stream_window_bytes={most}; nothing was stepped"
                    )
                yield Piece(launch, index, start, count, False, *parts, size)


def _held(lists: TensorLists, index: int) -> dict[str, Tensor]:
    state = {key: tensors[index] for key, tensors in lists.state.items()}
    return {MAIN: lists.main[index], **state}


def _all_cut(tensors: Tensors, start: int, count: int) -> Tensors:
    return {
        key: part_of_state(key, each, start, count) for key, each in tensors.items()
    }


def launches_of(
    launches: Sequence[PlannedLaunch], window: Window, lying: Sequence[Tensors]
) -> Iterator[PlannedLaunch]:
    """The launches of a window.

    Args:
        lying: for each piece main param and state in the window, to be stepped there.
    """
    pairs = zip(window, lying, strict=True)
    for launch, run in groupby(pairs, key=lambda pair: pair[0].launch):
        yield _launch_of(launches[launch], list(run))


def _launch_of(
    planned: PlannedLaunch, members: Sequence[tuple[Piece, Tensors]]
) -> PlannedLaunch:
    pieces = [piece for piece, _ in members]
    lists, indices = planned.lists, [piece.index for piece in pieces]
    grads = CachedTensorList(_grad_of(lists.grad[p.index], p) for p in pieces)
    outputs = [_output_of(lists.output[p.index], p) for p in pieces]
    mains = CachedTensorList(tensors[MAIN] for _, tensors in members)
    state = {key: [tensors[key] for _, tensors in members] for key in lists.state}
    noise = lists.noise and [
        replace(lists.noise[p.index], start=lists.noise[p.index].start + p.start)
        for p in pieces
    ]
    there = planned.launch._replace(device=mains[0].device)
    return PlannedLaunch(
        planned.group,
        list(map(planned.positions.__getitem__, indices)),
        planned.settings,
        there,
        planned.updates.take(indices),
        mains,
        outputs,
        TensorLists(
            mains, grads, state, outputs, noise, average_weight=lists.average_weight
        ),
    )


def _grad_of(grad: Tensor, piece: Piece) -> Tensor:
    return piece.beside[GRAD] if GRAD in piece.beside else _of_piece(grad, piece)


def _output_of(output: Tensor | None, piece: Piece) -> Tensor | None:
    if OUTPUT in piece.beside:
        return piece.beside[OUTPUT]
    return None if output is None else _of_piece(output, piece)


def _of_piece(tensor: Tensor, piece: Piece) -> Tensor:
    return (
        tensor
        if piece.is_whole
        else part_of_state(MAIN, tensor, piece.start, piece.count)
    )
