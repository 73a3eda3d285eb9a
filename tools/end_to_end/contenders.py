"""The optimizers that train the job, each with the settings of its own README."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mp_optim
from benchmarks.opponents import SETTINGS
from end_to_end.rows import NotInstalledError


@dataclass(frozen=True)
class Setting:
    """What the job asks of an optimizer.

    Attributes:
        clip: norm to clip all gradients to, or None.
        lr: learning rate, constant.
        pieces: micro-batches of a step.
        micro: sequences of a micro-batch.
    """

    clip: float | None
    lr: float
    pieces: int
    micro: int
    device: torch.device


class Loop:
    """A training loop around a torch optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any, setting: Setting) -> None:
        self.model, self.optimizer, self.setting = model, optimizer, setting

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return self.model(ids, labels)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add a micro-batch's gradients."""
        (loss / self.setting.pieces).backward()

    def step(self) -> None:
        if self.setting.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class OwnLoop(Loop):
    """Ours clips in the step, and begins work during the last micro-batch's backward."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        with nullcontext() if is_last else self.optimizer.no_sync():
            super().backward(loss, is_last)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class EngineLoop(Loop):
    """DeepSpeed's engine clips, accumulates and drops gradients itself."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.optimizer.backward(loss)
        if not is_last:
            self.optimizer.step()

    def step(self) -> None:
        self.optimizer.step()


@dataclass(frozen=True)
class Contender:
    """One way to train the job.

    Attributes:
        build: returns the loop of a model on its device.
        source: URL of the page that its settings are from; empty for torch and ours.
        clips: True if gradients can be clipped to a global norm.
        dtype: of the model's parameters.
        autocast: True to compute in bf16 from FP32 parameters.
    """

    build: Callable[[nn.Module, Setting], Loop]
    source: str = ""
    clips: bool = True
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False


def _library(package: str, module: str = "") -> Any:
    """Return a module.

    Raises:
        NotInstalledError: the package is not there.
    """
    try:
        return importlib.import_module(module or package)
    except ModuleNotFoundError as missing:
        raise NotInstalledError(f"{package} ({missing})") from missing


def _settings(setting: Setting) -> dict[str, Any]:
    return {**SETTINGS, "lr": setting.lr}


def torch_adamw(model: nn.Module, setting: Setting) -> Loop:
    adam = torch.optim.AdamW(model.parameters(), fused=True, **_settings(setting))
    return Loop(model, adam, setting)


def torchao_8bit(model: nn.Module, setting: Setting) -> Loop:
    if setting.device.type == "cpu":  # to compile its step takes a minute
        torch.compiler.set_stance("force_eager")
    adam = _library("torchao", "torchao.optim").AdamW8bit
    made = adam(model.parameters(), bf16_stochastic_round=True, **_settings(setting))
    return Loop(model, made, setting)


def torchao_offload(model: nn.Module, setting: Setting) -> Loop:
    made = _library("torchao", "torchao.optim").CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, fused=True, **_settings(setting)
    )
    return Loop(model, made, setting)


def bitsandbytes_8bit(model: nn.Module, setting: Setting) -> Loop:
    adam = _library("bitsandbytes", "bitsandbytes.optim").AdamW8bit
    return Loop(model, adam(model.parameters(), **_settings(setting)), setting)


def flashoptim(model: nn.Module, setting: Setting) -> Loop:
    settings = {key: value for key, value in _settings(setting).items() if key != "eps"}
    adam = _library("flashoptim").FlashAdamW
    return Loop(model, adam(model.parameters(), master_weight_bits=24, **settings), setting)


class _HostTensor(Tensor):
    """A tensor that counts as one in host memory; all others count as CUDA tensors."""


def _replace_cuda() -> None:
    """Replace streams, ``pin_memory`` and ``is_cuda`` on a CPU until this process ends."""
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock()  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, misc]
    Tensor.pin_memory = lambda tensor: tensor.as_subclass(_HostTensor)  # type: ignore[assignment]
    Tensor.is_cuda = property(lambda tensor: not isinstance(tensor, _HostTensor))  # type: ignore[assignment, misc]


def hybrid(model: nn.Module, setting: Setting, fraction: float = 1.0) -> Loop:
    on_gpu, name = setting.device.type == "cuda", f"{_MEGATRON}.cpu_offloading.hybrid_optimizer"
    if not on_gpu:
        _replace_cuda()
    made = _library("megatron-core", name).HybridDeviceOptimizer(
        [{"params": list(model.parameters())}],
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        pin_cpu_grads=on_gpu,
        pin_cpu_params=on_gpu,
        fused=True,
        **_settings(setting),
    )
    return Loop(model, made, setting)


def deepspeed_offload(model: nn.Module, setting: Setting, **zero: Any) -> Loop:
    on_gpu = setting.device.type == "cuda"
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = _library("deepspeed")
    if not dist.is_initialized():
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    config = {
        "train_micro_batch_size_per_gpu": setting.micro,
        "gradient_accumulation_steps": setting.pieces,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": _settings(setting)},
        "gradient_clipping": setting.clip or 0.0,
    }
    with patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        engine, *_ = deepspeed.initialize(model=model, config=config)
    return EngineLoop(engine, engine, setting)


def ours(model: nn.Module, setting: Setting, **settings: Any) -> Loop:
    adam = mp_optim.AdamW(
        model.named_parameters(), max_grad_norm=setting.clip, **_settings(setting), **settings
    )
    return OwnLoop(model, adam, setting)


_TORCHAO = "https://github.com/pytorch/ao/blob/main/torchao/optim/README.md"
_HDO = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/cpu_offloading/README.md"
_BNB = "https://huggingface.co/docs/bitsandbytes/main/en/optimizers"
_FLASH = "https://github.com/databricks/flashoptim"
_ZERO = "https://www.deepspeed.ai/tutorials/zero-offload"
_SUPER = (
    "https://github.com/deepspeedai/DeepSpeedExamples/tree/master/training/DeepSpeed-SuperOffload"
)
_MEGATRON = "megatron.core.optimizer"
_COMPACT = {"state": "8bit", "main_params": "remainder16"}
_HOST = {"device": "cpu", "pin_memory": True}

CONTENDERS: dict[str, Contender] = {
    "torch fused AdamW, FP32 params, autocast": Contender(
        torch_adamw, dtype=torch.float32, autocast=True
    ),
    "torch fused AdamW, pure bf16": Contender(torch_adamw),
    "torchao AdamW8bit": Contender(torchao_8bit, _TORCHAO),
    "torchao CPUOffloadOptimizer": Contender(torchao_offload, _TORCHAO, clips=False),
    "bitsandbytes AdamW8bit": Contender(bitsandbytes_8bit, _BNB),
    "FlashAdamW, 24 bits": Contender(flashoptim, _FLASH),
    "DeepSpeed ZeRO-Offload": Contender(
        partial(
            deepspeed_offload,
            stage=2,
            offload_optimizer=_HOST,
            contiguous_gradients=True,
            overlap_comm=True,
        ),
        _ZERO,
    ),
    "DeepSpeed SuperOffload": Contender(
        partial(
            deepspeed_offload,
            stage=3,
            offload_optimizer={
                **_HOST,
                "ratio": 0.9,
                "super_offload": True,
                "cpuadam_cores_perc": 0.9,
            },
        ),
        _SUPER,
    ),
    **{
        f"Megatron HybridDeviceOptimizer, {fraction}": Contender(
            partial(hybrid, fraction=fraction), _HDO
        )
        for fraction in (0.0, 0.5, 1.0)
    },
    **{
        f"ours, {name}": Contender(partial(ours, **settings))
        for name, settings in {
            "GPU, FP32": {},
            "GPU, 8-bit + remainder16": _COMPACT,
            "host 0.5, overlap": {"offload": 0.5, "offload_mode": "overlap"},
            "host, overlap": {"offload": 1.0, "offload_mode": "overlap"},
            "host, speculative": {"offload": 1.0, "offload_mode": "speculative"},
            "streamed, 8-bit + remainder16": {
                **_COMPACT,
                "offload": 1.0,
                "offload_place": "streamed",
            },
        }.items()
    },
}
