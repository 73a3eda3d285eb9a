"""Optimizers of other libraries that need a word before ``cls(params, **settings)`` makes them."""

from __future__ import annotations

from typing import Any

import torch


def megatron_hybrid(params: Any, **settings: Any) -> torch.optim.Optimizer:
    """Megatron-core's HybridDeviceOptimizer, all of it on the host."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    classes = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW}
    switches = {"pin_cpu_grads": False, "pin_cpu_params": False}
    switches["overlap_cpu_optimizer_d2h_h2d"] = False
    made: torch.optim.Optimizer = HybridDeviceOptimizer(
        params,
        offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=False,
        **classes,
        **switches,
        **settings,
    )
    return made


def adam_mini(params: Any, **settings: Any) -> torch.optim.Optimizer:
    """Adam-mini, which takes parameters with names."""
    from adam_mini import Adam_mini

    given = list(params)
    is_plain = not given or isinstance(given[0], torch.Tensor)
    named = [(f"layer{n}", param) for n, param in enumerate(given)] if is_plain else given
    made: torch.optim.Optimizer = Adam_mini(named, verbose=False, **settings)
    return made


def heavyball_adamw(params: Any, **settings: Any) -> torch.optim.Optimizer:
    """heavyball's AdamW, without its compilation."""
    import heavyball

    heavyball.utils.compile_mode = None
    made: torch.optim.Optimizer = heavyball.AdamW(params, **settings)
    return made
