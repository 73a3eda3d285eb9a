"""Optimizers of other libraries that need a word before ``cls(params, **settings)`` makes them."""

from __future__ import annotations

from typing import Any

import torch


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
