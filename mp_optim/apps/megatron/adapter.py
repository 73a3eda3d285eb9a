"""Adapter of a stack to Megatron's training loop, logging and checkpointing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mp_optim.apps.convert.formats import COPIES, states_of_members
from mp_optim.apps.convert.torch_files import load_plain_file
from mp_optim.apps.megatron import torch_format
from mp_optim.apps.megatron.torch_format import (
    REQUEST,
    SavedSettings,
    group_settings_of,
    groups_with_settings,
)
from mp_optim.core import current_grad, local_tensor, param_at
from mp_optim.core.names import matched_names
from mp_optim.host.calls import in_own_modes
from mp_optim.mixed_precision import MegatronOptimizer, Verdict
from mp_optim.mixed_precision.clip_and_skip import DISAGREEMENT, decide
from mp_optim.mixed_precision.grad_norm import EXCLUDED, MAIN_NORM, Measurement
from mp_optim.mixed_precision.observer import Observer
from mp_optim.mixed_precision.step import StepGrads, take_step
from mp_optim.offload.backward_scheduler import WorkerError
from mp_optim.zero.zero import DistributedOptimizer

_CHUNK = re.compile(r"model(\d+)$")
_OWN = ("_chunks", "_elsewhere", "_prepared", "init_state_fn")
"""Attributes that the adapter stores itself. Reads and writes of all other attributes go to the
stack."""


@dataclass
class _Prepared:
    """State of a step that a program takes in several calls: measured gradients and the decisions
    about them."""

    grads: StepGrads
    measurement: Measurement
    verdict: Verdict
    judge: Observer | None
    clipped: bool = False


class MegatronAdapter(torch.optim.Optimizer):
    """Adapter that forwards to a stack and adds the methods that only Megatron calls.

    For a stack that is not a chain, the adapter stands for one part of a chain, like Megatron's
    single optimizers.

    Args:
        stack: the optimizer of :func:`mp_optim.get_megatron_optimizer`.
        chunks: modules of the model.
        elsewhere: for each part of the stack, the param groups that only other ranks have.
    """

    stack: MegatronOptimizer
    _prepared: _Prepared | None = None

    def __init__(
        self,
        stack: MegatronOptimizer,
        chunks: Sequence[nn.Module] = (),
        elsewhere: Sequence[Sequence[SavedSettings]] | None = None,
    ) -> None:
        # NOTE: do not call torch's constructor, because it would make param groups, and the stack
        # already has all groups.
        self.__dict__["stack"] = stack
        self._chunks, self._elsewhere = list(chunks), elsewhere

    def __getattr__(self, name: str) -> Any:
        # An object that is being unpickled has no stack yet. Looking ``stack`` up in the stack
        # would recurse without end.
        if name == "stack":
            raise AttributeError(name)
        # Megatron's callers take any object with this attribute for a chain, so a part of a chain
        # must not have the attribute.
        if name == "chained_optimizers":
            raise AttributeError(
                "a part of a chain has no chained_optimizers; read chained_optimizers of the chain"
            )
        return getattr(self.stack, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name == "step":
            self.__dict__[name] = value
        else:
            setattr(self.stack, name, value)

    def __delattr__(self, name: str) -> None:
        if name != "step":
            delattr(self.stack, name)
        else:
            self.__dict__.pop(name, None)

    def __repr__(self) -> str:
        return repr(self.stack)

    def __reduce__(self) -> tuple[Any, ...]:
        return MegatronAdapter, (self.stack,)

    # -- methods that torch's class has, so that __getattr__ would not forward them to the stack

    def step(self, closure: Any = None) -> Any:
        """Take a step, and return ``(success, grad_norm, num_zeros_in_grad)``."""
        return self.stack.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.stack.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.stack.add_param_group(param_group)

    def _get_state(self) -> Any:
        return self.stack.state

    # -- around a step

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Copy the model's current values into the main params.

        Args:
            state_dict: FP32 values to copy in place of the model's values: a Megatron checkpoint
                (with ``model``, or ``model0`` and so on), or values by parameter name; None for the
                model's values.
        """
        named: dict[str, Any] = dict(state_dict or {})
        if isinstance(named.get("model"), Mapping):
            named = dict(named["model"])
        elif chunks := [key for key in named if _CHUNK.match(key)]:
            named = {
                f"{key.removeprefix('model')}.{name}": value
                for key in chunks
                for name, value in named[key].items()
            }
        called = matched_names(named, map(self.stack.slot_name, self.stack.slots()))
        values = {called[key]: value for key, value in named.items() if isinstance(value, Tensor)}
        self.stack.reload_model_params(values)

    def prepare_model_params_for_param_sync(self) -> None:
        """Wait until the parameters of the last step are complete on this rank."""
        self.stack.finish_param_sync()

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """True if this rank has a parameter in the norm group ``grad_norm_group``, whose gradients
        are clipped by their own norm."""
        keys = (self.stack.norm_key(slot) for slot in self.stack.slots())
        return any(key.group == grad_norm_group for key in keys)

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The last step's norms of the norm groups that are clipped separately, by name of the
        group."""
        norms = self.stack.counts.last_verdict().norms
        return {key: norms[key] for key in norms if key not in (MAIN_NORM, EXCLUDED)}

    def get_grad_stats_parallel_group(self) -> ProcessGroup | None:
        """Return the ranks that compute the gradient norm together; None for this rank alone.

        Raises:
            ValueError: the dense and the expert part have different process groups.
        """
        if not self.grads_states_parallel_group_is_shared():
            raise ValueError(
                "the dense and the expert part have different process groups for the gradient "
                "norm; call this method on each of chained_optimizers"
            )
        ranks = self.stack.chained_optimizers[0].norm_ranks()
        return ranks[0] if ranks else None

    def grads_states_parallel_group_is_shared(self) -> bool:
        """True if all parts compute the gradient norm over the same ranks."""
        members = [member.norm_ranks() for member in self.stack.chained_optimizers]
        return all(ranks == members[0] for ranks in members)

    # -- a step in several calls
    #
    # A caller that coordinates several optimizers prepares gradients, clips them and steps in
    # separate calls. No call changes gradients: the step multiplies each gradient by the clip
    # coefficient and the inverse loss scale when it is read.

    @in_own_modes
    def prepare_grads(self) -> bool:
        """Measure the gradients of this step.

        Returns:
            True if a gradient is not finite. Then the step is skipped, and the loss scale is
            updated.

        Raises:
            ValueError: an argument or a gradient is not valid, as in :meth:`step`. No parameter was
                changed.
        """
        stack = self.stack
        stack.check_lists()
        with stack.step_mark.step(stack):
            try:
                grads = stack.grads_of(stack)
            # A thread that worked during backward failed. Discard the jobs of backward, so that the
            # next step runs all jobs in this thread.
            except WorkerError:
                stack.discard_backward_work()
                raise
            measurement = grads.sums()
            judge = stack.observers.judge_on(torch.device("cpu"))
            verdict = self._decided(measurement, judge, 0.0)
            if verdict.cause == DISAGREEMENT:
                stack.refuse_disagreement()
        self._prepared = None
        if verdict.found_inf:
            take_step(stack, (grads, verdict, judge))
        else:
            self._prepared = _Prepared(grads, measurement, verdict, judge)
        return verdict.found_inf

    def get_grad_norm(self) -> float:
        """Return the norm of the prepared gradients, unscaled and not clipped, over all ranks."""
        norms = self._require("get_grad_norm").verdict.norms
        return norms.get(MAIN_NORM, 0.0)

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Decide the clip coefficient of the prepared step, and return the norm before clipping.
        Gradients do not change; :meth:`step_with_ready_grads` multiplies by the coefficient.

        Args:
            clip_grad: largest norm; 0 does not clip.

        Raises:
            RuntimeError: no gradients are prepared, or they are not finite.
        """
        prepared = self._require("clip_grad_norm")
        prepared.verdict = self._decided(prepared.measurement, prepared.judge, clip_grad)
        prepared.clipped = True
        return self.get_grad_norm()

    def count_zeros(self) -> int:
        """Return the number of zero elements of the prepared gradients, over all ranks.

        Raises:
            ValueError: ``log_num_zeros_in_grad`` is False, so zeros were not counted.
        """
        zeros = self._require("count_zeros").verdict.num_zeros
        if zeros is None:
            raise ValueError(
                "count_zeros: log_num_zeros_in_grad=False, so zeros were not counted when the "
                "gradients were read; set log_num_zeros_in_grad=True"
            )
        return zeros

    @in_own_modes
    def step_with_ready_grads(self) -> bool:
        """Take the step with the prepared gradients.

        Returns:
            True, unless ``grad_norm_skip_threshold`` skips the step.

        Raises:
            RuntimeError: the norm exceeds ``clip_grad``, and :meth:`clip_grad_norm` was not called.
        """
        prepared = self._require("step_with_ready_grads")
        norm, limit = prepared.verdict.grad_norm or 0.0, self.stack.config.clip_grad
        if not prepared.clipped and 0.0 < limit < norm:
            raise RuntimeError(
                f"step_with_ready_grads: clip_grad={limit:g}, but the norm is {norm:g} and "
                "clip_grad_norm was not called. Call optimizer.clip_grad_norm(limit), with 0 for "
                "no clipping; other ways of clipping have no effect here"
            )
        for scheduler in self.stack.backward_schedulers:
            scheduler.grads.forget_comparisons()
        self._prepared = None
        take_step(self.stack, (prepared.grads, prepared.verdict, prepared.judge))
        return not prepared.verdict.cause

    @in_own_modes
    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Any]:
        """Return this rank's unscaled FP32 gradients that count in a norm.

        Args:
            grad_norm_group: name of a separate norm; None for the global norm.
        """
        if self._prepared is None:
            with self.stack.step_mark.step(self.stack):
                self.stack.grads_of(self.stack)
        scaler, group = self.stack.grad_scaler, grad_norm_group or MAIN_NORM
        factor = 1.0 if scaler is None else scaler.inv_scale
        grads: list[Tensor] = []
        for part in self.stack.chained_optimizers:
            owner = part.shards if isinstance(part, DistributedOptimizer) else part
            for slot in owner.slots():
                grad = current_grad(param_at(owner.param_groups, slot))
                if grad is not None and owner.norm_key(slot).group == group:
                    grads.append((local_tensor(grad) * factor).to(torch.float32))
        return grads

    get_main_grads_for_grad_norm = get_grads_for_grad_norm

    def _decided(self, measurement: Measurement, judge: Observer | None, limit: float) -> Verdict:
        config = dataclasses.replace(self.stack.config, clip_grad=limit)
        scaler = self.stack.grad_scaler
        return decide(measurement, () if scaler is None else (scaler.inv_scale,), config, judge)

    def _require(self, caller: str) -> _Prepared:
        if self._prepared is None:
            raise RuntimeError(
                f"{caller}: no gradients are prepared; call prepare_grads() once a step, and "
                "continue only if it returns False"
            )
        return self._prepared

    # -- checkpoints

    def state_dict(self, is_loading: bool = False) -> Any:
        """Return the stack's state dict.

        If data-parallel ranks shard the state, the dict has only settings and the loss scale, and
        :meth:`save_parameter_state` writes the sharded state. ``is_loading`` is ignored; Megatron
        passes this argument.
        """
        parts = self.stack.chained_optimizers
        if not any(isinstance(part, DistributedOptimizer) for part in parts):
            return self.stack.state_dict()
        groups = [group for part in parts for group in group_settings_of(part)]
        common: dict[str, Any] = {torch_format.APART: True, "param_groups": groups}
        if self.stack.grad_scaler is not None:
            common["grad_scaler"] = self.stack.grad_scaler.state_dict()
        return common

    def load_state_dict(self, state_dict: Any, *, convert: bool = False) -> None:
        """Load a result of :meth:`state_dict`, or of ``dist_checkpointing.load``.

        Raises:
            ValueError: the state dict does not match; no state was loaded.
        """
        is_mapping, parts = isinstance(state_dict, Mapping), states_of_members(state_dict)
        if is_mapping and state_dict.get(torch_format.APART):
            plain = self.stack.state_dict()
            plain["param_groups"] = groups_with_settings(self.stack, state_dict["param_groups"])
            if state_dict.get("grad_scaler"):
                plain["grad_scaler"] = state_dict["grad_scaler"]
            self.stack.load_state_dict(plain)
        # Only a state dict of Megatron's Float16 optimizer has this key, so the dict identifies
        # state by position.
        elif any(COPIES in part for part in parts):
            torch_format.load_positional(self.stack, parts, convert=convert)
        elif is_mapping and REQUEST in state_dict:
            from mp_optim.apps.megatron.dist_checkpointing import plain_state_dict

            self.stack.load_state_dict(plain_state_dict(self.stack, state_dict), convert=convert)
        else:
            self.stack.load_state_dict(state_dict, convert=convert)

    def save_parameter_state(self, filename: str) -> None:
        """Write the sharded state into one file, on the first data-parallel rank. The call is
        collective."""
        torch_format.save_parameter_state(self.stack, filename)

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Load a file of :meth:`save_parameter_state`, on any number of data-parallel ranks.

        Raises:
            ValueError: another optimizer wrote the file, or the file does not match; no state was
                loaded.
        """
        torch_format.load_parameter_state(self.stack, filename)

    def save_state_dict_to_file(self, filename: str) -> None:
        """Write all state of this rank. Megatron's program calls this method for a layer-wise
        optimizer."""
        torch.save(self.stack.state_dict(), filename)

    def load_state_dict_from_file(self, filename: str) -> None:
        """Load a file that :meth:`save_state_dict_to_file` wrote on this rank. The number of ranks
        must be the same.

        Raises:
            ValueError: the file does not match; no state was loaded.
        """
        self.stack.load_state_dict(load_plain_file(filename))

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[Any, Any]:
        """Return the tensors that ``dist_checkpointing`` saves or loads.

        :meth:`load_state_dict` accepts the loaded tensors. With a distributed optimizer the call is
        collective over the data-parallel ranks.

        Args:
            model_sharded_state_dict: sharded state dict of the model's parameters.
            is_loading: True for a load, False for a save.
            sharding_type: replaces the type in the metadata; None for the metadata's type.
            metadata: Megatron's metadata. A save sets ``distrib_optim_sharding_type`` to the
                written format, so that the checkpoint names its format.

        Raises:
            ValueError: Megatron's format does not support the optimizer's state, or the sharding
                type is not supported; the message names a format to use.
        """
        # Import here, because Megatron may not be installed, and only this method needs it.
        from mp_optim.apps.megatron import dist_checkpointing

        elsewhere = self._elsewhere or [[] for _ in self.stack.chained_optimizers]
        settings: dict[str, Any] = {} if metadata is None else metadata
        asked = (self.stack, model_sharded_state_dict, elsewhere, settings, sharding_type)
        if is_loading:
            return dist_checkpointing.requested_state_dict(*asked, self._chunks)
        return dist_checkpointing.sharded_state_dict(*asked)
