"""A small GPT of Megatron-core on a CPU, in its DistributedDataParallel. Training makes up
gradients, because Megatron's attention has no forward pass on a CPU."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore", module="megatron")

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core import optimizer as optimizers  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def without_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let Megatron's buffers and checkpointing run without CUDA."""
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)


class CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class AdamOfGroups(torch.optim.Optimizer):
    """AdamW that counts steps in param groups, as Transformer Engine and apex do.

    Megatron's distributed optimizer over torch's AdamW does not load its own checkpoints.
    """

    def __init__(self, params: Any, lr: float, adam_w_mode: bool, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, group)

    def _step(self, param: Tensor, group: dict[str, Any]) -> None:
        state, step = self.state[param], group["step"]
        first, second = group["betas"]
        mean = state.setdefault("exp_avg", torch.zeros_like(param))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
        mean.lerp_(param.grad, 1 - first)
        square.mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
        root = (square / (1 - second**step)).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(mean, root, value=-group["lr"] / (1 - first**step))


def with_steps_in_groups(patch: pytest.MonkeyPatch) -> None:
    """Let Megatron build its optimizers with :class:`AdamOfGroups`."""
    patch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    patch.setattr(optimizers, "Adam", AdamOfGroups)
    patch.setattr(distrib_optimizer, "Adam", AdamOfGroups)
    patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)


def initialize(store: Any = None, **sizes: int) -> None:
    alone = {} if store is None else {"rank": 0, "world_size": 1, "store": store}
    dist.init_process_group("gloo", **alone)
    parallel_state.initialize_model_parallel(**sizes)


def finish() -> None:
    """Undo :func:`initialize`."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def gpt(precision: str = "bf16", *, experts: int = 0, distributed: bool = False) -> nn.Module:
    dtype = DTYPES[precision]
    moe = {"num_moe_experts": experts, "moe_ffn_hidden_size": 32} if experts else {}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        **moe,
    )
    torch.manual_seed(1)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts or None, normalization="RMSNorm"),
        vocab_size=64,
        max_sequence_length=8,
        share_embeddings_and_output_weights=False,
    ).to(dtype)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    return DistributedDataParallel(config, ddp, model)


def optimizer_config(precision: str = "bf16", **settings: Any) -> OptimizerConfig:
    half = {} if precision == "fp32" else {precision: True}
    return OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": 1e-2,
            "clip_grad": 0.5,
            "initial_loss_scale": 2.0**16,
            **half,
            **settings,
        }
    )


def train(model: nn.Module, optimizer: Any, steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = _distance(model, step)
        optimizer.scale_loss(loss).backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _distance(model: nn.Module, step: int) -> Tensor:
    split = parallel_state.get_tensor_model_parallel_rank()
    copy = 1000 * step + 10 * parallel_state.get_data_parallel_rank()
    distances = []
    for param in model.parameters():
        part = split if getattr(param, "tensor_model_parallel", False) else 0
        generator = torch.Generator().manual_seed(copy + part)
        noise = torch.randn(param.shape, generator=generator)
        distances.append((param.float() - noise).square().mean())
    return torch.stack(distances).sum()


def save(folder: Path, model: nn.Module, optimizer: Any, metadata: dict[str, Any]) -> None:
    model_state = model.module.sharded_state_dict()
    state = {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, metadata=metadata),
    }
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)


def load(folder: Path, model: nn.Module, optimizer: Any) -> None:
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    model_state = model.module.sharded_state_dict()
    asked = optimizer.sharded_state_dict(model_state, is_loading=True, metadata=metadata)
    state = dist_checkpointing.load({"model": model_state, "optimizer": asked}, str(folder))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
