"""Emulator of compiled kernels that needs no GPU; README.md in this folder describes it."""
