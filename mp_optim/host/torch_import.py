"""Imports torch without its warning that NumPy is missing: mp_optim does not need NumPy.

Programs that import torch themselves see the warning as before.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch  # noqa: F401
