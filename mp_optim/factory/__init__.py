"""Build the stack from a config and a model, and plan its memory."""
