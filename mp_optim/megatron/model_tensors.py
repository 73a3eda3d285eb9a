"""The model's own sharded tensors, of which those of the optimizer's state are made: they say where
in the whole model this rank's parameters are, whatever the parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor

ModelTensor = Any
"""One parameter of the model's sharded state dict: Megatron's ``ShardedTensor``, or the
``ShardedTensorFactory`` that makes some of it."""


def model_tensors(
    model_sharded_state_dict: Any, named: Sequence[tuple[str, Tensor]]
) -> list[ModelTensor]:
    """The model's sharded tensor of each named parameter.

    Raises:
        ValueError: it has none, naming the parameter.
    """
    if not named:
        return []
    ids = [id(to_local_if_dtensor(param)) for _, param in named]
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    by_id: dict[int, ModelTensor] = {
        id(entry.data): entry for entry in nested_values(sharded)
    }
    for key, (name, _) in zip(ids, named, strict=True):
        if key not in by_id:
            raise ValueError(
                f"{name} is not in the model's sharded state dict, so nothing says where in the "
                "model it is: pass model.sharded_state_dict() as it comes (its tensors have to be "
                "the parameters themselves, keep_vars=True)"
            )
    return [by_id[key] for key in ids]


def state_tensor(
    model_tensor: ModelTensor, key: str, value: Tensor, *, only_here: bool = False
) -> ModelTensor:
    """A state tensor of a parameter, placed as the parameter is.

    Args:
        key: of the state, as Megatron calls it. value: of the local parameter's shape.
        only_here: no other data-parallel rank saves it, so this one has to.
    """
    sharded = make_sharded_optimizer_tensor(
        model_tensor, value, prefix=f"optimizer.state.{key}"
    )
    if only_here:
        sharded = replace(sharded, replica_id=_first_copy(sharded.replica_id))
    return sharded


def _first_copy(replica_id: Any) -> Any:
    """A replica id with the last coordinate, the data-parallel one, set to 0."""
    return (*replica_id[:-1], 0) if isinstance(replica_id, tuple) else 0
