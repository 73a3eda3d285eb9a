"""The ``mp-optim`` command."""
