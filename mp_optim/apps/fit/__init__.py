"""``mp-optim fit`` and ``plan``: whether a model fits a machine, and with which settings."""
