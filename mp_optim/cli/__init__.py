"""``mp-optim``: commands for users, one module each."""
