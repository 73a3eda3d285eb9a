"""A machine that carries out compiled kernels without a GPU; see README.md beside it."""
