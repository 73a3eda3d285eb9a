"""A stack as Megatron's training loop, logging and checkpointing ask for it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from mp_optim.megatron.full_precision import values_by_name
from mp_optim.megatron.saved_groups import Settings
from mp_optim.megatron.step_in_parts import AsksForParts
from mp_optim.precision import MegatronOptimizer

_GRAPH_WRAPPER = "OptimizerCudaGraphWrapper"


class MegatronFace(AsksForParts, torch.optim.Optimizer):
    """Passes everything on to a stack, and answers what only Megatron asks.

    One object that forwards, so that the stacks themselves need not grow by every method that a
    program of Megatron's calls around a step.

    Args:
        elsewhere: for each part of the stack, the param groups that only other ranks have.

    Attributes:
        stack: the optimizer of :func:`mp_optim.get_megatron_optimizer`.
    """

    def __init__(
        self,
        stack: MegatronOptimizer,
        elsewhere: Sequence[Sequence[Settings]] | None = None,
    ) -> None:
        # NOTE: torch's constructor would make groups of its own; all there is belongs to the stack.
        self.__dict__["stack"] = stack
        self.__dict__["_elsewhere"] = elsewhere or [
            [] for _ in stack.chained_optimizers
        ]

    def __getattr__(self, name: str) -> Any:
        if name in ("stack", "_elsewhere"):  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self.stack, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "step":
            setattr(self.stack, name, value)
        elif type(value).__name__ != _GRAPH_WRAPPER:
            # with optimizer_cuda_graph the step here captures itself
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if name != "step":
            delattr(self.stack, name)
        else:  # Megatron takes its CUDA graph away
            self.__dict__.pop(name, None)

    def __repr__(self) -> str:
        return repr(self.stack)

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronFace, (self.stack,)

    @property
    def chained_optimizers(self) -> list[Any]:
        """The parts, the same objects each time; those of a stack without any: itself."""
        stacks = self.stack.chained_optimizers
        parts: list[PartFace] = self.__dict__.setdefault("_parts", [])
        if [part.stack for part in parts] != stacks:
            parts[:] = [PartFace(stack) for stack in stacks]
        return parts

    # Methods that torch's class has and the stack overrides.

    def step(self, closure: Any = None) -> Any:
        """``(success, grad_norm, num_zeros_in_grad)``."""
        return self.stack.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.stack.zero_grad(set_to_none)

    def state_dict(self, is_loading: bool = False) -> Any:
        """The stack's; of one that data-parallel ranks share out, what all of them have alike, and
        :meth:`save_parameter_state` writes the rest. ``is_loading`` is for Megatron's callers and
        changes nothing."""
        legacy = importlib.import_module("mp_optim.megatron.parameter_state")
        if legacy.is_shared_out(self.stack):
            return legacy.common_state_dict(self.stack)
        return self.stack.state_dict()

    def load_state_dict(self, state_dict: Any, *, convert: bool = False) -> None:
        """What :meth:`state_dict` made, or ``dist_checkpointing.load`` loaded."""
        loading = importlib.import_module("mp_optim.megatron.loaded_state")
        legacy = importlib.import_module("mp_optim.megatron.parameter_state")
        if legacy.is_apart(state_dict):
            legacy.load_common(self.stack, state_dict)
        elif loading.is_loaded(state_dict):
            plain = loading.plain_state_dict(self.stack, state_dict)
            self.stack.load_state_dict(plain, convert=convert)
        else:
            self.stack.load_state_dict(state_dict, convert=convert)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.stack.add_param_group(param_group)

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Take the model's present values into the main params.

        Args:
            state_dict: a checkpoint of Megatron's with the model's values in full precision
                (``model``, or ``model0`` and on), or such values by name; used where given.
        """
        self.stack.reload_model_params(values_by_name(self.stack, state_dict or {}))

    # What only Megatron asks for.

    def prepare_model_params_for_param_sync(self) -> None:
        """Before evaluation: parameters are what forward reads, whenever a step has returned."""
        self.stack.finish_param_sync()

    def save_parameter_state(self, filename: str) -> None:
        """Write state that data-parallel ranks share out, into a file that the first of them
        writes. Collective over them."""
        legacy = importlib.import_module("mp_optim.megatron.parameter_state")
        legacy.save_parameter_state(self.stack, filename)

    def load_parameter_state(
        self, filename: str, *, update_legacy_format: bool = False
    ) -> None:
        """Load what :meth:`save_parameter_state` wrote, with any number of data-parallel ranks.

        Raises:
            ValueError: it was written by another optimizer, or does not fit; nothing was loaded.
        """
        legacy = importlib.import_module("mp_optim.megatron.parameter_state")
        legacy.load_parameter_state(self.stack, filename)

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[Any, Any]:
        """What ``dist_checkpointing`` saves, or loads into; :meth:`load_state_dict` takes what it
        loaded. Collective over the data-parallel ranks with a distributed optimizer.

        Args:
            model_sharded_state_dict: of the model's parameters.
            is_loading: what is to be loaded, else what is to be saved.
            sharding_type: instead of the one in the metadata.
            metadata: Megatron's. In saving, ``distrib_optim_sharding_type`` becomes the form that
                was written, so that a checkpoint that holds this dict says what is in it.

        Raises:
            ValueError: Megatron's form cannot hold this state, or is not read here; with what to
                use.
        """
        settings: dict[str, Any] = {} if metadata is None else metadata
        sharded = importlib.import_module("mp_optim.megatron.sharded")
        make = (
            sharded.requested_state_dict if is_loading else sharded.sharded_state_dict
        )
        kind = sharding_type or settings.get(sharded.SHARDING_TYPE)
        arguments = (model_sharded_state_dict, self._elsewhere, settings, kind)
        made: dict[Any, Any] = make(self.stack, *arguments)
        return made


class PartFace(MegatronFace):
    """A part of a stack. As a part of Megatron's it has no ``chained_optimizers``: callers ask for
    them by ``hasattr``."""

    def __getattribute__(self, name: str) -> Any:
        if name == "chained_optimizers":
            raise AttributeError("a part of a chain has no chained_optimizers")
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name == "chained_optimizers":
            raise AttributeError("a part of a chain has no chained_optimizers")
        return super().__getattr__(name)
