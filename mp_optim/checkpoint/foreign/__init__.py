"""Optimizer state of other libraries, in and out. Each format is a module of pure functions from
and to :class:`ForeignState`, which is by parameter name; :func:`import_state` and
:func:`export_state` connect it to an optimizer. `docs/migrate.md` shows every way.
"""

from mp_optim.checkpoint.foreign.apex import from_apex
from mp_optim.checkpoint.foreign.deepspeed import from_deepspeed, to_deepspeed
from mp_optim.checkpoint.foreign.file import from_checkpoint, from_file, to_file
from mp_optim.checkpoint.foreign.megatron import from_megatron
from mp_optim.checkpoint.foreign.state import ForeignGroup, ForeignState
from mp_optim.checkpoint.foreign.torch_format import fp32_params, from_torch, to_torch
from mp_optim.checkpoint.foreign.transfer import export_state, import_state

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
    "to_deepspeed",
    "to_file",
    "to_torch",
]
