"""A stack as Megatron's training loop, logging and checkpointing ask for it."""

from __future__ import annotations

from typing import Any

import torch

from mp_optim.megatron.checkpoints import SavesAsMegatron
from mp_optim.megatron.full_precision import values_by_name
from mp_optim.megatron.step_in_parts import AsksForParts
from mp_optim.precision import MegatronOptimizer

_GRAPH_WRAPPER = "OptimizerCudaGraphWrapper"


class MegatronFace(AsksForParts, SavesAsMegatron, torch.optim.Optimizer):
    """Passes everything on to a stack, and answers what only Megatron asks.

    One object that forwards, so that the stacks themselves need not grow by every method that a
    program of Megatron's calls around a step.

    Attributes:
        stack: the optimizer of :func:`mp_optim.get_megatron_optimizer`.
    """

    def __init__(self, stack: MegatronOptimizer) -> None:
        # NOTE: torch's constructor would make groups of its own; all there is belongs to the stack.
        self.__dict__["stack"] = stack

    def __getattr__(self, name: str) -> Any:
        if name == "stack":  # of an object that is being unpickled
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
