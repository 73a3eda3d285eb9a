"""Megatron-core's own optimizer stack, unchanged from ``get_megatron_optimizer`` down.

On a GPU it steps with the Adam that it finds: Transformer Engine's, apex's or torch's. On a CPU it
falls back to torch for everything. These parts are replaced:

- a job: a process group of this process alone, and Megatron's parallel state over it;
- its DDP wrapper: a plain module list with a ``ddp_config``, whose parameters have the
  ``main_grad`` that DDP would give them: bfloat16 like the parameters, or FP32 with
  ``grad_reduce_in_fp32`` (off by default; Megatron's training script turns it on for bfloat16). At
  each step Megatron widens the former to FP32 tensors of its own, and clips the latter in place;
- on a CPU the GPU: small tensors that it makes on ``cuda`` are made on the CPU, and
  ``tensor.type()``, which it compares with the names of CUDA tensors, returns those. Both only
  while its code runs.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.opponents import BETAS, CLIP, DECAY, EPS, LR
from benchmarks.section import Step

_MODULES = (
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
)
"""Those of its modules that make tensors on ``cuda`` in a step."""

TIGHTER = 0.9
"""Gradients clipped in place have the norm they were clipped to, so the next step has to clip to
less."""

_type = torch.Tensor.type


class _HostTorch:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(data: Any, *, device: object = None, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **kwargs)

    @staticmethod
    def zeros(*size: Any, device: object = None, **kwargs: Any) -> Tensor:
        return torch.zeros(*size, **kwargs)


def _cuda_type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _type(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found


@contextmanager
def _without_cuda() -> Iterator[None]:
    with ExitStack() as stack:
        for name in _MODULES:
            stack.enter_context(
                mock.patch.object(importlib.import_module(name), "torch", _HostTorch())
            )
        stack.enter_context(mock.patch.object(torch.Tensor, "type", _cuda_type))
        yield


def _start_job(backend: str) -> None:
    """Start a job of this process alone, without parallelism, unless there is one."""
    state = importlib.import_module("megatron.core.parallel_state")
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(create_gloo_process_groups=False)


@contextmanager
def job_ended() -> Iterator[None]:
    """End the job that steps built in the block have started, if any."""
    try:
        yield
    finally:
        if dist.is_initialized():
            importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
            dist.destroy_process_group()


def _model(params: Sequence[Tensor], main_grads: Sequence[Tensor]) -> nn.Module:
    wide = main_grads[0].dtype == torch.float32
    model: Any = nn.ParameterList([nn.Parameter(param) for param in params])
    model.ddp_config = importlib.import_module(
        "megatron.core.distributed"
    ).DistributedDataParallelConfig(grad_reduce_in_fp32=wide)
    for param, grad in zip(model, main_grads, strict=True):
        param.main_grad = grad
    return model  # type: ignore[no-any-return]


def _stack() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns if neither apex nor Transformer Engine is there
        return importlib.import_module("megatron.core.optimizer")


def adam() -> str:
    """Return the name of the Adam that Megatron steps with, or a note that there is no Megatron."""
    try:
        stack = _stack()
    except ImportError:
        return "no Adam (not installed)"
    if stack.USING_PYTORCH_OPTIMIZER:
        return "torch fused AdamW"
    module: str = stack.Adam.__module__
    return f"{stack.Adam.__name__} of {module.partition('.')[0]}"


def megatron_step(params: Sequence[Tensor], main_grads: Sequence[Tensor], *, fused: bool) -> Step:
    """The whole mixed-precision step of Megatron-core over bfloat16 params, clipping on.

    Args:
        params: the model's parameters, bfloat16; they are updated in place.
        main_grads: bfloat16, read at every step and never written; or FP32, which Megatron clips in
            place: each step clips to ``TIGHTER`` times the norm that the one before clipped to.
        fused: if Megatron steps with torch's AdamW, set ``fused=True``, which Megatron itself sets
            only for offloading; its AdamW loops over tensors and operations otherwise.

    Raises:
        ImportError: megatron-core is not installed.
        RuntimeError: params are on a CPU, and Megatron found apex or Transformer Engine, whose Adam
            steps CUDA tensors only.
    """
    stack, on_gpu = _stack(), params[0].device.type == "cuda"
    if not on_gpu and not stack.USING_PYTORCH_OPTIMIZER:
        raise RuntimeError(
            "Megatron takes its Adam from apex or Transformer Engine here, which have none for the "
            "CPU"
        )
    _start_job("nccl" if on_gpu else "gloo")
    place = nullcontext if on_gpu else _without_cuda
    config = stack.OptimizerConfig(
        optimizer="adam",
        lr=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        weight_decay=DECAY,
        clip_grad=CLIP,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    with place():
        optimizer = stack.get_megatron_optimizer(
            config, [_model(params, main_grads)], config_overrides={}, use_gloo_process_groups=False
        )
    if fused and stack.USING_PYTORCH_OPTIMIZER:
        for group in optimizer.param_groups:
            group["fused"] = True
    return _stepper(optimizer, place, TIGHTER if main_grads[0].dtype == torch.float32 else 1.0)


def _stepper(optimizer: Any, place: Callable[[], Any], tighter: float) -> Callable[[], object]:
    def step() -> object:
        with place():
            result = optimizer.step()
        optimizer.config.clip_grad *= tighter
        return result

    return step
