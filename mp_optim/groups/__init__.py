"""Param groups: which parameters share hyperparameters, and how these change over steps."""
