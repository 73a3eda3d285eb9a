"""Param groups: assignment of hyperparameters to parameters, and their schedules."""
