"""What Megatron's checkpointing asks of an optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mp_optim.megatron.saved_groups import Settings
from mp_optim.precision import MegatronOptimizer


class SavesAsMegatron:
    """The part of a face that saves and loads; modules that need Megatron are imported when they
    are used.

    Attributes:
        stack: whose state it is.
    """

    stack: MegatronOptimizer
    _elsewhere: Sequence[Sequence[Settings]] | None = None
    _chunks: Sequence[nn.Module] = ()

    def set_model(
        self, chunks: Sequence[nn.Module], elsewhere: Sequence[Sequence[Settings]]
    ) -> None:
        """Say what state belongs to.

        Args:
            chunks: the model.
            elsewhere: for each part of the stack, the param groups that only other ranks have.
        """
        self.__dict__["_chunks"] = list(chunks)
        self.__dict__["_elsewhere"] = elsewhere

    def state_dict(self, is_loading: bool = False) -> Any:
        """The stack's; of one that data-parallel ranks share out, what all of them have alike, and
        :meth:`save_parameter_state` writes the rest. ``is_loading`` is for Megatron's callers and
        changes nothing."""
        legacy = importlib.import_module("mp_optim.megatron.parameter_state")
        if legacy.is_shared_out(self.stack):
            return legacy.common_state_dict(self.stack)
        return self.stack.state_dict()

    def load_state_dict(self, state_dict: Any, *, convert: bool = False) -> None:
        """What :meth:`state_dict` made, or ``dist_checkpointing.load`` loaded.

        Raises:
            ValueError: it does not fit; nothing was loaded.
        """
        loading = importlib.import_module("mp_optim.megatron.loaded_state")
        legacy = importlib.import_module("mp_optim.megatron.parameter_state")
        positional = importlib.import_module("mp_optim.megatron.positional_state")
        if legacy.is_apart(state_dict):
            legacy.load_common(self.stack, state_dict)
        elif positional.is_positional(state_dict):
            positional.load_positional(self.stack, state_dict, convert=convert)
        elif loading.is_loaded(state_dict):
            plain = loading.plain_state_dict(self.stack, state_dict)
            self.stack.load_state_dict(plain, convert=convert)
        else:
            self.stack.load_state_dict(state_dict, convert=convert)

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

    def save_state_dict_to_file(self, filename: str) -> None:
        """Write what this rank has, all of it: what Megatron asks of a layer-wise optimizer."""
        torch.save(self.stack.state_dict(), filename)

    def load_state_dict_from_file(self, filename: str) -> None:
        """Load what :meth:`save_state_dict_to_file` wrote on the same rank of as many.

        Raises:
            ValueError: it does not fit; nothing was loaded.
        """
        self.stack.load_state_dict(torch.load(filename, weights_only=True))

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
        kind = sharding_type or settings.get(sharded.SHARDING_TYPE)
        elsewhere = self._elsewhere or [[] for _ in self.stack.chained_optimizers]
        arguments = (self.stack, model_sharded_state_dict, elsewhere, settings, kind)
        made: dict[Any, Any]
        if is_loading:
            requested = importlib.import_module("mp_optim.megatron.requested")
            made = requested.requested_state_dict(*arguments, self._chunks)
        else:
            made = sharded.sharded_state_dict(*arguments)
        return made
