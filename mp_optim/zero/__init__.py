"""ZeRO: flat buckets, gradient reduction, parameter gathering, and composites of optimizers."""
