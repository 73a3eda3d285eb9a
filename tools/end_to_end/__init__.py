"""One training job with every optimizer: the parts of ``tools/benchmark_training.py``."""
