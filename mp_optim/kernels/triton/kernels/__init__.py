"""The kernels. Importing this package imports Triton; ``kernels/triton/backend.py`` does so at
its first use.

A launch covers all tensors that share dtypes. Its tables lie on the device: for each program the
tensor it works on (``owners``), for each tensor its first program (``firsts``), its size and the
addresses of its parts. A program works on ``CHUNK`` elements of one tensor. Columns of addresses
that a launch does not need are None. Every launch of a rule is one of ``tiles.step``, which
gathers what a program works on and hands it to the rule (``RULE``).

Every arithmetic operation is one IEEE operation, as docs/numerics.md wants: ``div_rn`` and
``sqrt_rn``, no contraction (``enable_fp_fusion=False`` at launch), and no arithmetic between scalar
arguments, which the interpreter would do in double.
"""
