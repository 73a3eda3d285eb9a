"""The old name of ``python -m mp_optim.cli.doctor``, for one release."""

from mp_optim.cli.doctor import main

if __name__ == "__main__":
    main()
