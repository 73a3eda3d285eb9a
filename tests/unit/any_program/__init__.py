"""A machine that writes programs: random use of the public API against a model of its promises in numpy.

``arithmetic`` is docs/numerics.md in numpy, ``oracle`` what the promises say a program leaves behind, ``setups`` what a
program starts from, ``subject`` the package under test, ``machine`` the operations that programs are made of.
"""
