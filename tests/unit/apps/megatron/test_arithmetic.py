"""Documented differences between Megatron's step and ours."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from lab.any_program.arithmetic import stepped, stored
from mp_optim import FusedAdam
from support.models import TinyMoE, same_bits, train

core = pytest.importorskip("megatron.core.optimizer")
from mp_optim.apps import megatron  # noqa: E402

SCALE, LIMIT = 128.0, 0.02


@dataclasses.dataclass
class Newest(core.OptimizerConfig):  # type: ignore[misc, name-defined]
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98


class MegatronsOrder:
    """An FP16 step with a constant scale in the order of Megatron's
    ``Float16OptimizerWithFloat16Params``. Gradients are cast to FP32, unscaled, then clipped by an
    FP64 norm."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.mains = [nn.Parameter(param.detach().float()) for param in self.params]
        self.inner = FusedAdam(self.mains, lr=1e-2, weight_decay=0.0)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * SCALE

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> tuple[bool, float, None]:
        grads = [param.grad.float() * (1.0 / SCALE) for param in self.params]
        norm = sum(grad.double().square().sum() for grad in grads).sqrt().item()
        assert norm > LIMIT
        grads = [grad * (LIMIT / (norm + 1e-6)) for grad in grads]
        for main, grad in zip(self.mains, grads, strict=True):
            main.grad = grad
        self.inner.step()
        for param, main in zip(self.params, self.mains, strict=True):
            param.detach().copy_(main.detach())
        return True, norm, None


def test_fp16_step_has_bits_of_separate_unscaling_and_clipping():
    """The loss scale is a power of two, so unscaling rounds nothing, and one multiplication by the
    product has the bits of two multiplications."""
    model, other = TinyMoE(torch.float16), TinyMoE(torch.float16)
    config = core.OptimizerConfig(
        lr=1e-2, weight_decay=0.0, fp16=True, loss_scale=SCALE, clip_grad=LIMIT
    )
    ours = train(model, megatron.get_megatron_optimizer(config, [model], {}), 30)
    assert ours == train(other, MegatronsOrder(other), 30)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(one, another)


def test_megatron_lion_uses_lion_betas_for_every_parameter():
    """Megatron's own ``--optimizer lion`` uses the betas of Adam and steps matrices only."""
    weight = nn.Parameter(torch.linspace(-1.0, 1.0, 12).reshape(3, 4))
    weight.is_embedding_or_output_parameter = True
    model = nn.Module()
    model.register_parameter("weight", weight)
    config = Newest(optimizer="lion", lr=1e-2, weight_decay=0.1, adam_beta1=0.1, adam_beta2=0.2)
    config.clip_grad = 0.0
    with pytest.warns(UserWarning, match="lion_beta1"):
        optimizer = megatron.get_megatron_optimizer(config, [model])
    settings = {"lr": 1e-2, "betas": (0.95, 0.98), "weight_decay": 0.1}
    p = weight.detach().numpy().flatten()
    state = {"exp_avg": stored(torch.zeros(12).numpy(), "float32", False)}
    for step in range(1, 6):
        weight.grad = torch.cos(torch.arange(12.0) * step).reshape(3, 4)
        optimizer.step()
        p, state = stepped("lion", p, weight.grad.numpy().flatten(), state, step, settings, 1.0)
        assert same_bits(weight.detach().flatten(), torch.from_numpy(p))
