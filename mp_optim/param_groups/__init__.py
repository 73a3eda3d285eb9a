"""Param groups: hyperparameters for sets of parameters, and the schedules of these
hyperparameters."""
