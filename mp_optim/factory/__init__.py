"""Factory of the optimizer stack for a config and a model, and planner of its memory."""
