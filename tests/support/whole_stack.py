"""Build Megatron's optimizer from parameters and settings, like a torch optimizer."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from mp_optim import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer


def half_on_the_host(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> MegatronOptimizer:
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    held = [each for group in groups for each in group["params"]]
    params = [each[1] if isinstance(each, tuple) else each for each in held]
    model = nn.ParameterList()
    for index, param in enumerate(params):
        model.register_parameter(str(index), param)
    config = OptimizerConfig(
        lr=lr,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        weight_decay=weight_decay,
        clip_grad=0.0,
        bf16=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.5,
    )
    return get_megatron_optimizer(config, model, param_groups=groups)
