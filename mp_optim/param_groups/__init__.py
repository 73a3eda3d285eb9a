"""Param groups: hyperparameters by parameter, and their schedules."""
