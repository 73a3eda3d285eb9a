"""Backends with kernels of torch, NVIDIA apex and Transformer Engine.

The optimizer classes of these libraries are not used, because they key state by tensor and keep
master weights outside the state dict. The kernels' results are within a tolerance of ``reference``
(docs/numerics.md), but the bits differ.

The multi-tensor kernels check few arguments (docs/upstream-defects.md), so this module checks the
arguments before a launch. Large tensors are split into pieces far below 2^31 elements. Empty
tensors are left out.
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
"""Largest number of elements of a tensor, because the kernels have 32-bit indices."""

MOST_TENSORS = 1024
"""Largest number of tensors per call. Transformer Engine has about 20,000 tensor handles per
process, and uses a handle for each tensor of a call."""

KERNEL_DEVICE = CUDA.type
"""Device type on which the kernels run."""


def check_launch(
    name: str, lists: Sequence[Sequence[Tensor]], dtypes: Sequence[torch.dtype]
) -> None:
    """Check the lists of a launch, because a kernel would compute wrong results without an error.

    Args:
        name: name of the kernel.
        lists: tensor lists of the launch.
        dtypes: expected dtype of each list.

    Raises:
        ValueError: a list is empty; or a tensor is empty, too large, not contiguous, of another
            dtype or size than expected, or not on a device of the kernels.
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
            f"{name}: needs lists of contiguous tensors of {list(dtypes)} on {KERNEL_DEVICE}, with "
            f"1 to {MOST_ELEMENTS} elements and equal sizes in every list, but was given {given}; "
            "choose fused_backend='auto'"
        )


def sums_by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, FP64, shape (n,), added in torch's order."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    # torch adds in the order of memory, so copy strided tensors to row-major order.
    row_major = [tensor.contiguous() for tensor in tensors]
    return torch.stack(list(torch._foreach_norm(row_major, 2, dtype=torch.float64))).square()


class MultiTensorBackend(ReferenceBackend):
    """Base class of the apex and Transformer Engine backends.

    ``reference`` computes the steps that the libraries' kernels do not support.

    Args:
        library: module with the ``multi_tensor_*`` functions.
    """

    def __init__(self, library: Any) -> None:
        self.library = library

    def takes(self, kind: LaunchDtypes) -> bool:
        """True if the library's kernels support these dtypes: FP32 main params and moments."""
        state = {kind.main, kind.remainder, kind.moment1, kind.moment2} - {None}
        return state == {torch.float32}

    def split(
        self, rule: str, lists: TensorLists
    ) -> Iterator[tuple[LaunchDtypes | None, TensorLists]]:
        """Divide lists by dtypes. Yield the dtypes and the lists of each part.

        The dtypes are None for a part that ``reference`` has to step.
        """
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
        """Call a kernel of the library with a new overflow flag.

        An earlier launch may have set its flag, and some kernels do nothing if their flag is set.
        """
        check_launch(f"{self.name}: {name}", lists, dtypes)
        device = lists[0][0].device
        with current_device(device):
            flag = torch.zeros(1, dtype=torch.int32, device=device)
            tensors = [list(each) for each in lists]
            return getattr(self.library, name)(CHUNK_ELEMENTS, flag, tensors, *arguments)

    def scaled(self, grads: Sequence[Tensor], multiplier: float) -> list[Tensor]:
        """Return FP32(g) * multiplier for each gradient of a batch, as new FP32 tensors."""
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
        """Step a batch of tensors with equal dtypes by Adam."""
        raise NotImplementedError

    def sgd(self, kind: LaunchDtypes, batch: TensorLists, s: SgdScalars, multiplier: float) -> None:
        """Step a batch of tensors with equal dtypes by SGD.

        Without momentum the kernel reads the momentum buffers but does not write them, so the
        gradients are passed instead.
        """
        grads = batch.grad if kind.grad == torch.float32 else self.scaled(batch.grad, multiplier)
        buffers = batch.state.get("momentum_buffer", grads)
        numbers = s.decay, s.momentum, 1.0 - s.one_minus_dampening, s.lr
        switches = bool(s.nesterov), bool(s.first), False
        left = multiplier if grads is batch.grad else 1.0
        lists, dtypes = [grads, batch.main, buffers], [torch.float32] * 3
        self.launch("multi_tensor_sgd", lists, dtypes, *numbers, *switches, left)
        write_outputs(batch)

    sum_of_squares = staticmethod(sums_by_torch)


def _adam_arguments(s: AdamScalars) -> tuple[Any, ...]:
    """Return the settings of a step as arguments of the Adam kernels of apex and Transformer
    Engine."""
    switches = 0 if s.l2 else 1, int(s.bias_correction)
    return s.given_lr, s.beta1, s.beta2, s.eps, s.given_step, *switches, s.given_decay


# -- apex -----------------------------------------------------------------------------------------


class ApexBackend(MultiTensorBackend):
    """Backend for apex's kernels, which support FP32 main params and moments.

    The kernels need gradients and parameters of one dtype, and take no multiplier. So 16-bit
    gradients, and gradients with a multiplier, are first converted to FP32, batch by batch.
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

    def lamb(self, lists: TensorLists, s: LambScalars, multiplier: float) -> None:
        for kind, alike in self.split("lamb", lists):
            sizes = [main.numel() for main in alike.main]
            fits = [kind is not None and size <= MOST_ELEMENTS for size in sizes]
            taken = [(index, size) for index, size in enumerate(sizes) if fits[index] and size]
            for indices in runs_of(taken, piece_elements(alike.main[0].device)):
                batch = alike.take(indices)
                # The kernel overwrites the gradient with the direction, so pass a copy.
                grads, state = self.scaled(batch.grad, multiplier), batch.state
                columns = [grads, batch.main, state["exp_avg"], state["exp_avg_sq"]]
                # A norm of 0 turns clipping off, because the multiplier already clips. A clip limit
                # of 0 would set all gradients to 0.
                norm = torch.zeros(1, dtype=torch.float32, device=batch.main[0].device)
                switches = int(s.grad_weight != 1.0), 0 if s.l2 else 1, norm, 1.0, s.adapts
                numbers = s.given_lr, s.beta1, s.beta2, s.eps, s.given_step
                arguments = (*numbers, int(s.bias_correction), s.given_decay, *switches)
                self.launch("multi_tensor_lamb", columns, [torch.float32] * 4, *arguments)
                write_outputs(batch)
                take_averages(batch)
            mark_written(alike)
            if rest := [index for index, fit in enumerate(fits) if not fit]:
                super().lamb(alike.take(rest), s, multiplier)


# -- Transformer Engine ---------------------------------------------------------------------------

_QUIET_NAN = 0x7FC0


def load_transformer_engine() -> TransformerEngineBackend:
    """Import Transformer Engine's package, which loads the core library, then its torch extension.

    Raises:
        Exception: the installation is missing or broken. The error may be of any class.
    """
    importlib.import_module("transformer_engine.pytorch")
    library = importlib.import_module("transformer_engine_torch")
    if not hasattr(library, "multi_tensor_adam_param_remainder"):
        raise ImportError(
            "this version of Transformer Engine has no Adam for 16-bit remainders; install a "
            "newer version"
        )
    return TransformerEngineBackend(library)


class TransformerEngineBackend(MultiTensorBackend):
    """Backend for Transformer Engine's kernels, with FP32 main params or remainders of 16 bits.

    Both moments are FP32, or both are bfloat16. Adam's kernel reads 16-bit gradients and writes
    16-bit parameters in the same pass. The kernels check dtypes, but neither devices nor strides.
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
            # Set the remainder of a zero to 0. For a zero with a negative remainder, the kernel
            # would subtract 1 from the zero's bits, which gives a NaN.
            _give_back(low.masked_fill_((high & 0x7FFF) == 0, 0), rests)
            lists = [*lists, rests]
        elif outputs:
            lists = [grads, outputs, first, second, batch.main]
        self.launch(name, lists, [tensors[0].dtype for tensors in lists], *_adam_arguments(s))
        if REMAINDER in batch.state:
            # The kernel splits CUDA's NaN, 0x7fffffff, into a bfloat16 zero and a negative
            # remainder. No other result has these bits. Replace this zero by a NaN, or the NaN
            # would be lost.
            high, low = _bits_of(batch.main, rests)
            hidden = ((high & 0x7FFF) == 0) & (low < 0)
            _give_back(high.masked_fill_(hidden, _QUIET_NAN).view(torch.bfloat16), batch.main)
            _give_back(low.masked_fill_(hidden, 0), rests)
            write_outputs(batch)


def _bits_of(params: list[Tensor], rests: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all parameters as integers of their bits, and all remainders, as two flat copies.

    Two flat tensors need a fixed number of launches, for any number of parameters.
    """
    return torch.cat([param.view(torch.int16) for param in params]), torch.cat(rests)


def _give_back(values: Tensor, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() for tensor in tensors]
    torch._foreach_copy_(tensors, values.split_with_sizes(sizes))


# -- torch: gradients are converted to FP32 batch by batch, which needs little memory -------------


class TorchBackend(ReferenceBackend):
    """Backend with torch's kernels: ``torch._fused_adam_``, ``torch._fused_adamw_`` and
    ``torch._fused_sgd_``.

    ``reference`` computes other rules.
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
        """Step a batch by torch's Adam kernels.

        torch computes bias corrections from a step count, but the scalars already include them. At
        step infinity torch's corrections are exactly 1. The corrections are moved to lr and eps
        instead: ``(lr/bias1) * m / (sqrt(v)*c + eps) = (lr/bias1/c) * m / (sqrt(v) + eps/c)``.
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

    sum_of_squares = staticmethod(sums_by_torch)

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
