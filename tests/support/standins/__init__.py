"""Modules that stand in for GPU libraries: their formulas in numpy, and their silence where they
check nothing."""
