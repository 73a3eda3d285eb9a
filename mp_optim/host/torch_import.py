"""Import torch without its warning that NumPy is missing, because mp_optim does not need NumPy.

Programs that import torch first still see the warning.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch  # noqa: F401
