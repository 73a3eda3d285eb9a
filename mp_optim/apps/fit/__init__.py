"""``mp-optim fit`` and ``plan``: does a model fit a machine, and with which settings."""
