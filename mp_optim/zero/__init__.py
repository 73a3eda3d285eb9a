"""ZeRO: flat buckets, gradient reduction, parameter gathering, composites of optimizers."""
