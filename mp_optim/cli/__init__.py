"""Commands for users, one module each: ``python -m mp_optim.cli.doctor``."""
