"""Kernels of torch, NVIDIA apex and Transformer Engine.

Their optimizer classes are not used, because these key state by tensor and keep master weights
outside the state dict. All kernels are within the tolerance of docs/numerics.md to ``reference``,
not bitwise equal to it.

The multi-tensor kernels check few of their arguments (docs/upstream-defects.md), so this module
checks them before a launch. Tensors are split into pieces far below 2^31 elements; empty ones are
left out.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mp_optim.config.rules import RULES
from mp_optim.core import CachedTensorList
from mp_optim.core.slot_state import REMAINDER
from mp_optim.host.accelerator import CUDA, current_device
from mp_optim.kernels.chunking import (
    batches,
    mark_written,
    piece_elements,
    runs_of,
    take_averages,
    write_outputs,
)
from mp_optim.kernels.element_rules import gradients
from mp_optim.kernels.kernel_args import (
    AdamScalars,
    LambScalars,
    LaunchDtypes,
    SgdScalars,
    TensorLists,
    alike_lists,
    kept_moments,
)
from mp_optim.kernels.reference import ReferenceBackend

CHUNK_ELEMENTS = 2048 * 32
"""Number of elements of one thread block."""

MOST_ELEMENTS = 2**31 - 1 - CHUNK_ELEMENTS
"""Largest number of elements of a tensor for the kernels' 32-bit indices."""

MOST_TENSORS = 1024
"""Largest number of tensors per call: Transformer Engine keeps a handle for each, some 20,000 in
all."""

KERNEL_DEVICE = CUDA.type
"""The device type of the kernels."""


def check_launch(
    name: str, lists: Sequence[Sequence[Tensor]], dtypes: Sequence[torch.dtype]
) -> None:
    """Refuse a launch that a kernel would compute wrongly without an error.

    Args:
        name: name of the kernel.
        dtypes: dtype of each list.

    Raises:
        ValueError: a list is empty, tensors are empty, too large, of different sizes, not
            contiguous, of another dtype, or not on one device of the kernels' kind.
    """
    columns = [CachedTensorList(tensors) for tensors in lists]
    sizes = columns[0].own_sizes if columns else ()
    devices = set[torch.device]().union(*(column.devices for column in columns))
    fits = (
        len(sizes)
        and all(0 < size <= MOST_ELEMENTS for size in sizes)
        and [device.type for device in devices] == [KERNEL_DEVICE]
        and all(column.own_sizes == sizes for column in columns)
        and all(column.contiguous and column.stored for column in columns)
        and [column.dtypes for column in columns] == [{dtype} for dtype in dtypes]
    )
    if not fits:
        given = [(column.own_sizes, column.dtypes, column.devices) for column in columns]
        raise ValueError(
            f"{name}: needs lists of contiguous tensors of {list(dtypes)} on {KERNEL_DEVICE}, "
            f"each of 1 to {MOST_ELEMENTS} elements and equal in every list; given {given}"
        )


def sums_by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """Return the FP64 sum of squares of each tensor, shape (n,), in torch's own order."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    # Row-major, like staged copies of gradients, because torch sums in the order of memory.
    row_major = [tensor.contiguous() for tensor in tensors]
    return torch.stack(list(torch._foreach_norm(row_major, 2, dtype=torch.float64))).square()


class MultiTensorBackend(ReferenceBackend):
    """Common part of the apex and Transformer Engine backends.

    ``reference`` computes steps that their kernels do not support.

    Args:
        library: the module with the ``multi_tensor_*`` functions.
    """

    def __init__(self, library: Any) -> None:
        self.library = library

    def takes(self, kind: LaunchDtypes) -> bool:
        """True if kernels support a kind; here FP32 main params and state."""
        state = {kind.main, kind.remainder, kind.moment1, kind.moment2} - {None}
        return state == {torch.float32}

    def split(
        self, rule: str, lists: TensorLists
    ) -> Iterator[tuple[LaunchDtypes | None, TensorLists]]:
        """Yield parts of the lists with equal dtypes; None instead of dtypes for parts of
        ``reference``."""
        for _, kind, alike in alike_lists(lists, kept_moments(lists, RULES[rule].moment_names)):
            is_taken = kind is not None and alike.noise is None and self.takes(kind)
            yield (kind if is_taken else None), alike

    def launch(
        self,
        name: str,
        lists: Sequence[Sequence[Tensor]],
        dtypes: Sequence[torch.dtype],
        *arguments: Any,
    ) -> Any:
        """Call a kernel with a new overflow flag, which no earlier launch has set."""
        check_launch(f"{self.name}: {name}", lists, dtypes)
        device = lists[0][0].device
        with current_device(device):
            flag = torch.zeros(1, dtype=torch.int32, device=device)
            tensors = [list(each) for each in lists]
            return getattr(self.library, name)(CHUNK_ELEMENTS, flag, tensors, *arguments)

    def scaled(self, grads: Sequence[Tensor], multiplier: float) -> list[Tensor]:
        """Return FP32(g) * multiplier as new tensors, for one batch."""
        fresh = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        dtypes = [grads[0].dtype, torch.float32]
        self.launch("multi_tensor_scale", [grads, fresh], dtypes, multiplier)
        return fresh

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: float) -> None:
        launches: dict[str, Callable[..., None]] = {"adam": self.adam, "sgd": self.sgd}
        for kind, alike in self.split(rule, lists):
            if kind is None or rule not in launches:
                super().step(rule, alike, scalars, multiplier)
                continue
            for _, batch in batches(alike, MOST_TENSORS):
                launches[rule](kind, batch, scalars, multiplier)
                take_averages(batch)
            mark_written(alike)

    def adam(
        self, kind: LaunchDtypes, batch: TensorLists, s: AdamScalars, multiplier: float
    ) -> None:
        """Step one batch of one kind."""
        raise NotImplementedError

    def sgd(self, kind: LaunchDtypes, batch: TensorLists, s: SgdScalars, multiplier: float) -> None:
        """Step one batch of one kind.

        Without momentum the kernel reads a buffer but does not write it, so any list can be passed.
        """
        grads = batch.grad if kind.grad == torch.float32 else self.scaled(batch.grad, multiplier)
        buffers = batch.state.get("momentum_buffer", grads)
        numbers = s.decay, s.momentum, 1.0 - s.one_minus_dampening, s.lr
        switches = bool(s.nesterov), bool(s.first), False
        left = multiplier if grads is batch.grad else 1.0
        lists, dtypes = [grads, batch.main, buffers], [torch.float32] * 3
        self.launch("multi_tensor_sgd", lists, dtypes, *numbers, *switches, left)
        write_outputs(batch)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        return sums_by_torch(tensors)


def _adam_arguments(s: AdamScalars) -> tuple[Any, ...]:
    """Return the inputs from which both libraries' kernels compute their scalars."""
    switches = 0 if s.l2 else 1, int(s.bias_correction)
    return s.given_lr, s.beta1, s.beta2, s.eps, s.given_step, *switches, s.given_decay


# -- apex -----------------------------------------------------------------------------------------


class ApexBackend(MultiTensorBackend):
    """Backend for apex: FP32 main params and moments.

    The kernels need gradients and parameters of one dtype. So gradients in 16 bits, or with a
    multiplier, are converted to FP32 batch by batch.
    """

    name = "apex"
    limits = (
        "float64 gradients, lion, and LAMB of parameters that are sharded or beyond 2^31 elements: "
        "reference"
    )

    def adam(
        self, kind: LaunchDtypes, batch: TensorLists, s: AdamScalars, multiplier: float
    ) -> None:
        plain = kind.grad == torch.float32 and multiplier == 1.0
        grads = batch.grad if plain else self.scaled(batch.grad, multiplier)
        lists = [grads, batch.main, batch.state["exp_avg"], batch.state["exp_avg_sq"]]
        self.launch("multi_tensor_adam", lists, [torch.float32] * 4, *_adam_arguments(s))
        write_outputs(batch)

    def lamb(self, lists: TensorLists, scalars: LambScalars, multiplier: float) -> None:
        for kind, alike in self.split("lamb", lists):
            sizes = [main.numel() for main in alike.main]
            fits = [kind is not None and size <= MOST_ELEMENTS for size in sizes]
            taken = [(index, size) for index, size in enumerate(sizes) if fits[index] and size]
            for indices in runs_of(taken, piece_elements(alike.main[0].device)):
                self._lamb_launch(alike.take(indices), scalars, multiplier)
            mark_written(alike)
            if rest := [index for index, fit in enumerate(fits) if not fit]:
                super().lamb(alike.take(rest), scalars, multiplier)

    def _lamb_launch(self, batch: TensorLists, s: LambScalars, multiplier: float) -> None:
        """Launch apex's LAMB kernels for one batch.

        The kernel overwrites the gradient with the direction, so it gets a copy. A clip limit of 0
        would set all gradients to 0; a norm of 0 disables clipping.
        """
        grads, state = self.scaled(batch.grad, multiplier), batch.state
        lists = [grads, batch.main, state["exp_avg"], state["exp_avg_sq"]]
        norm = torch.zeros(1, dtype=torch.float32, device=batch.main[0].device)
        switches = int(s.grad_weight != 1.0), 0 if s.l2 else 1, norm, 1.0, s.adapts
        numbers = s.given_lr, s.beta1, s.beta2, s.eps, s.given_step
        arguments = (*numbers, int(s.bias_correction), s.given_decay, *switches)
        self.launch("multi_tensor_lamb", lists, [torch.float32] * 4, *arguments)
        write_outputs(batch)
        take_averages(batch)


# -- Transformer Engine ---------------------------------------------------------------------------

_QUIET_NAN = 0x7FC0


def load_transformer_engine() -> TransformerEngineBackend:
    """Import the extension. Importing the package first loads its core library.

    Raises:
        Exception: any error of a missing or broken installation (not only ImportError).
    """
    importlib.import_module("transformer_engine.pytorch")
    library = importlib.import_module("transformer_engine_torch")
    if not hasattr(library, "multi_tensor_adam_param_remainder"):
        raise ImportError("it has no Adam for 16-bit remainders; install a newer version")
    return TransformerEngineBackend(library)


class TransformerEngineBackend(MultiTensorBackend):
    """Backend for Transformer Engine: FP32 or bfloat16 moments, and FP32 main params or remainders.

    Both moments have one dtype, and remainders have 16 bits. Its Adam reads 16-bit gradients and
    writes the 16-bit parameter in the same pass. It checks dtypes but neither devices nor strides.
    """

    name = "transformer_engine"
    limits = "float64 gradients, lamb and lion: reference"

    def takes(self, kind: LaunchDtypes) -> bool:
        if super().takes(kind):
            return True
        mains = (kind.main, kind.remainder)
        has_mains = mains in ((torch.float32, None), (torch.bfloat16, torch.int16))
        moments = {kind.moment1, kind.moment2} - {None}
        is_adams = kind.moment2 is not None
        return has_mains and is_adams and moments in ({torch.float32}, {torch.bfloat16})

    def adam(
        self, kind: LaunchDtypes, batch: TensorLists, s: AdamScalars, multiplier: float
    ) -> None:
        grads = batch.grad if multiplier == 1.0 else self.scaled(batch.grad, multiplier)
        first, second = batch.state["exp_avg"], batch.state["exp_avg_sq"]
        outputs = [output for output in batch.output if output is not None]
        name, lists = "multi_tensor_adam", [grads, batch.main, first, second]
        if REMAINDER in batch.state:
            name, rests = "multi_tensor_adam_param_remainder", batch.state[REMAINDER]
            high, low = _bits_of(batch.main, rests)
            # Clear the remainder of a zero, because the kernel would borrow from it and compute a
            # NaN.
            _give_back(low.masked_fill_((high & 0x7FFF) == 0, 0), rests)
            lists = [*lists, rests]
        elif outputs:
            lists = [grads, outputs, first, second, batch.main]
        self.launch(name, lists, [tensors[0].dtype for tensors in lists], *_adam_arguments(s))
        if REMAINDER in batch.state:
            # CUDA's NaN, 0x7fffffff, rounds to a bfloat16 zero. No other value has a negative
            # remainder with a
            # zero.
            high, low = _bits_of(batch.main, rests)
            hidden = ((high & 0x7FFF) == 0) & (low < 0)
            _give_back(high.masked_fill_(hidden, _QUIET_NAN).view(torch.bfloat16), batch.main)
            _give_back(low.masked_fill_(hidden, 0), rests)
            write_outputs(batch)


def _bits_of(params: list[Tensor], rests: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return copies of all parameters, as integers of their bits, and of all remainders.

    Each is one flat tensor of a batch's size, so the number of launches does not depend on the
    number of tensors.
    """
    return torch.cat([param.view(torch.int16) for param in params]), torch.cat(rests)


def _give_back(values: Tensor, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    torch._foreach_copy_(tensors, values.split_with_sizes(sizes))


# -- torch: fed with FP32 gradients batch by batch, so that no full copy is made ------------------


class TorchBackend(ReferenceBackend):
    """Backend with ``torch._fused_adam(w)_`` for Adam and ``torch._fused_sgd_`` for SGD.

    ``reference`` computes LAMB.
    """

    name = "torch"

    def step(self, rule: str, lists: TensorLists, scalars: Any, multiplier: float) -> None:
        kernels: dict[str, Callable[..., None]] = {"adam": self._adam, "sgd": self._sgd}
        if rule not in kernels:
            super().step(rule, lists, scalars, multiplier)
            return
        for _, batch in batches(lists):
            kernels[rule](batch, gradients(batch, [], multiplier, 0.0), scalars)
            write_outputs(batch)
            take_averages(batch)
        mark_written(lists)

    def _adam(self, batch: TensorLists, grads: list[Tensor], scalars: AdamScalars) -> None:
        """Step Adam with torch's kernels.

        torch derives the bias corrections from a step count, but here they are part of the scalars.
        At step infinity torch's are exactly 1, and ours are applied to lr and eps: ``(lr/bias1) * m
        / (sqrt(v)*c + eps) = (lr/bias1/c) * m / (sqrt(v) + eps/c)``.
        """
        kernel: Callable[..., Any] = (
            torch._fused_adamw_ if scalars.l2 == 0.0 else torch._fused_adam_
        )
        lr = scalars.step_size / scalars.inv_sqrt_bias2
        weight_decay = scalars.l2 if scalars.l2 != 0.0 else scalars.decay / lr if lr != 0.0 else 0.0
        settled = torch.full((), math.inf, device=batch.main[0].device)
        kernel(
            batch.main,
            grads,
            batch.state["exp_avg"],
            batch.state["exp_avg_sq"],
            [],
            [settled] * len(batch.main),
            lr=lr,
            beta1=scalars.beta1,
            beta2=scalars.beta2,
            weight_decay=weight_decay,
            eps=scalars.eps / scalars.inv_sqrt_bias2,
            amsgrad=False,
            maximize=False,
        )

    def _sgd(self, batch: TensorLists, grads: list[Tensor], scalars: SgdScalars) -> None:
        torch._fused_sgd_(
            batch.main,
            grads,
            batch.state.get("momentum_buffer", []),
            weight_decay=scalars.decay,
            momentum=scalars.momentum,
            lr=scalars.lr,
            dampening=1.0 - scalars.one_minus_dampening,
            nesterov=scalars.nesterov,
            maximize=False,
            is_first_step=scalars.first,
        )

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        return sums_by_torch(tensors)
