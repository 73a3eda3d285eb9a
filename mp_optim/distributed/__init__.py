"""Which rank: who owns which elements, how gradients and parameters travel, and composites of
optimizers."""
