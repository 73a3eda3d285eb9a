"""The old name of ``mp-optim doctor``, for one release."""

from mp_optim.cli.doctor import main

if __name__ == "__main__":
    main()
