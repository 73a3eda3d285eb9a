"""Configuration: the config, the checks of its fields, and the capabilities of each backend."""

from mp_optim.config.optimizer_config import (
    AdamOptimizerConfig,
    OptimizerConfig,
    SGDOptimizerConfig,
)

__all__ = ["AdamOptimizerConfig", "OptimizerConfig", "SGDOptimizerConfig"]
