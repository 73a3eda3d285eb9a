"""What is planned for: names, shapes and dtypes of parameters, from a module, a Hugging Face config
or a list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.slots.names import named_params
from mp_optim.slots.param_attributes import (
    is_copied_in_tensor_parallel,
    is_expert_param,
)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model.

    Attributes:
        name: FQN.
        shape: of the whole parameter, before any sharding.
        dtype: of the model's parameter.
        is_expert: whether it belongs to a routed expert.
        trainable: whether it gets gradients and state.
        vector_like: whether tensor parallelism leaves it whole whatever its shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    is_expert: bool = False
    trainable: bool = True
    vector_like: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return torch.Size(self.shape).numel()


def specs_of(source: Any, dtype: torch.dtype | None = None) -> list[ParamSpec]:
    """Parameters of a model; tied ones once, under their first name.

    Args:
        source: a module (on any device, also meta), a list of modules, a ``transformers`` config
            (its model is built on the meta device), or parameter specs.
        dtype: instead of the source's own; a config without one is taken as bfloat16.

    Raises:
        TypeError: the source is something else.
    """
    if isinstance(source, nn.Module):
        return _from_named(named_params([source]), dtype)
    if hasattr(source, "to_diff_dict") and hasattr(source, "model_type"):
        return _from_config(source, dtype)
    items = list(source) if isinstance(source, Iterable) else []
    if items and all(isinstance(item, ParamSpec) for item in items):
        return items
    if items and all(isinstance(item, nn.Module) for item in items):
        return _from_named(named_params(items), dtype)
    raise TypeError(
        f"source is a {type(source).__name__}: plan for a module, a list of modules, a "
        "transformers config "
        "or a list of ParamSpec"
    )


def _from_named(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
) -> list[ParamSpec]:
    seen: set[int] = set()
    specs = []
    for name, param in named:
        if id(param) in seen:
            continue
        seen.add(id(param))
        whole = is_copied_in_tensor_parallel(param)
        specs.append(
            ParamSpec(
                name,
                tuple(param.shape),
                dtype or param.dtype,
                is_expert_param(param, name),
                param.requires_grad,
                whole,
            )
        )
    return specs


def _from_config(config: Any, dtype: torch.dtype | None) -> list[ParamSpec]:
    import transformers

    own = getattr(config, "dtype", None)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype or own or torch.bfloat16
        )
    return specs_of(model)
