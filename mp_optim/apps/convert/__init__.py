"""Import and export of optimizer state in formats of other libraries.

Functions read each format into :class:`ForeignState`, which has state by parameter name.
:func:`import_state` copies such state into an optimizer, and :func:`export_state` copies an
optimizer's state out.
"""

from mp_optim.apps.convert.formats import (
    fp32_params,
    from_apex,
    from_deepspeed,
    from_megatron,
    from_torch,
    to_torch,
)
from mp_optim.apps.convert.state import (
    ForeignGroup,
    ForeignState,
    export_state,
    from_checkpoint,
    from_file,
    import_state,
    to_file,
)

__all__ = [
    "ForeignGroup",
    "ForeignState",
    "export_state",
    "fp32_params",
    "from_apex",
    "from_checkpoint",
    "from_deepspeed",
    "from_file",
    "from_megatron",
    "from_torch",
    "import_state",
    "to_file",
    "to_torch",
]
