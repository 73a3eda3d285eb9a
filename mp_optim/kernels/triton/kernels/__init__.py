"""The Triton kernels. Importing this package imports Triton, so ``kernels/triton/backend.py``
imports the package at its first use.

A launch steps all tensors with equal dtypes. Its tables are on the device: the tensor of each
program (``owners``), and for each tensor its first program (``firsts``), its size, and the
addresses of its gradient, main param, output and state. A program steps ``CHUNK`` elements of one
tensor. A column of addresses that a launch does not need is None. Every launch of a rule runs
``tiles.step``, which loads the arguments of the program's chunk and calls the rule (``RULE``).

Every arithmetic operation is one IEEE operation (docs/numerics.md): ``div_rn`` and ``sqrt_rn``, and
no contraction (``enable_fp_fusion=False`` at launch). No operation has two scalar arguments,
because the interpreter would compute such an operation in double.
"""
