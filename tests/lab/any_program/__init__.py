"""A machine that writes programs: random use of the public API against a model of its promises in
numpy.

``arithmetic`` is docs/numerics.md in numpy, ``oracle`` what the promises say a program leaves
behind, ``setups`` what a program starts from, ``starting`` what the optimizer then holds,
``subject`` the package under test, ``machine`` the operations that programs are made of;
``gradients``, ``leaving`` and ``nonsense`` are what some of them take.
"""
