"""Optimizers of other libraries that need a word before ``cls(params, **settings)`` makes them."""

from __future__ import annotations

from typing import Any

import torch


def adam_mini(params: Any, **settings: Any) -> torch.optim.Optimizer:
    from adam_mini import Adam_mini

    given = list(params)
    is_plain = not given or isinstance(given[0], torch.Tensor)
    named = [(f"layer{n}", param) for n, param in enumerate(given)] if is_plain else given
    made: torch.optim.Optimizer = Adam_mini(named, verbose=False, **settings)
    return made


def heavyball_adamw(params: Any, **settings: Any) -> torch.optim.Optimizer:
    import heavyball

    heavyball.utils.compile_mode = None
    made: torch.optim.Optimizer = heavyball.AdamW(params, **settings)
    return made


class _UncompiledTorch:
    def __getattr__(self, name: str) -> Any:
        return (lambda function, **_: function) if name == "compile" else getattr(torch, name)


def torchao_adamw8bit(params: Any, **settings: Any) -> torch.optim.Optimizer:
    from torchao.optim import adam

    adam.torch = _UncompiledTorch()
    made: torch.optim.Optimizer = adam.AdamW8bit(params, **settings)
    return made


def galore_adamw(params: Any, **settings: Any) -> torch.optim.Optimizer:
    from galore_torch import GaLoreAdamW

    given = list(params)
    is_plain = not given or isinstance(given[0], torch.Tensor)
    groups = [{"params": given}] if is_plain else [dict(group) for group in given]
    for group in groups:
        group["params"] = list(group["params"])
        if all(param.dim() == 2 for param in group["params"]):
            group.update(rank=4, update_proj_gap=50, scale=1.0, proj_type="std")
    made: torch.optim.Optimizer = GaLoreAdamW(
        groups if given else [], no_deprecation_warning=True, **settings
    )
    return made
