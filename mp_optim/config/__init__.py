"""What to build: the config, the checks of its fields, and what each backend can do."""

from mp_optim.config.optimizer_config import (
    AdamOptimizerConfig,
    OptimizerConfig,
    SGDOptimizerConfig,
)

__all__ = ["AdamOptimizerConfig", "OptimizerConfig", "SGDOptimizerConfig"]
