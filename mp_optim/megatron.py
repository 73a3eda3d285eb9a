"""This package's optimizers in Megatron: call ``mp_optim.megatron.install()`` before ``pretrain``.

``python -m mp_optim.megatron pretrain_gpt.py ARGS`` calls ``install()`` without a change of the
program. The code is in :mod:`mp_optim.apps.megatron`.
"""

from typing import Any

from mp_optim.apps import megatron as _plug
from mp_optim.apps.megatron import *  # noqa: F403  the names are those of __all__ there
from mp_optim.apps.megatron import __all__ as __all__


def __getattr__(name: str) -> Any:
    return getattr(_plug, name)


if __name__ == "__main__":
    from mp_optim.apps.megatron.__main__ import main

    main()
