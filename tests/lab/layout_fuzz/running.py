"""One rank of a case: build, train, save or load, and return the outcome."""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from lab import tenants
from lab.layout_fuzz import by_class
from lab.layout_fuzz.case import Case, Layer, Layout, Param
from lab.layout_fuzz.holding import Place, placements_of
from lab.layout_fuzz.model import Network, gradient, initial, row_factors, used
from lab.layout_fuzz.publishing import Published
from mp_optim import OptimizerConfig, ProcessGroups, checkpoint, get_megatron_optimizer
from mp_optim.checkpoint import FlatShard
from mp_optim.checkpoint.entries import entry_name
from mp_optim.checkpoint.file_format import read_index, read_manifest
from mp_optim.config.rules import RULES
from support.models import COMPACT

FORMS: dict[str, dict[str, Any]] = {
    **COMPACT,
    "lone": {"param_remainder_bits": 0, "stochastic_rounding": True},
}
"""Forms of state, by the second word of a precision."""
PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "streamed": {"offload_place": "streamed", "stream_window_bytes": 16384},
    "disk": {"optimizer_state_path": gettempdir(), "stream_window_bytes": 65536},
}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "averages": {"ema_decay": 0.5},
    "state form": {"use_precision_aware_optimizer": True},
    "norms": {"log_param_grad_norms": 2},
    "zeros": {"log_num_zeros_in_grad": True},
    "spikes": {"skip_step_sigma_factor": 6.0},
}
"""What one rank alone may be built with, by the name of the disagreement."""


@dataclass
class Outcome:
    """The outcome of a rank.

    Attributes:
        error: text of the exception.
        stage: model (torch's part), optimizer, training, checkpoint or reading.
        losses: of each step and micro-batch; None where this rank used nothing.
        tensors: parameters (their averages, too), main params and state by name; whole where they
            are DTensors or flat shards.
        digest: digest of each parameter and state tensor, by its name in a checkpoint.
    """

    error: str = ""
    stage: str = ""
    step: int = -1
    seconds: float = 0.0
    losses: list[list[float | None]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    zeros: list[int | None] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    digest: Mapping[str, int] = field(default_factory=dict)


def config_of(case: Case, layout: Layout) -> OptimizerConfig:
    precision, _, form = case.precision.partition("-")
    settings: dict[str, Any] = {"lr": 2.0**-6, "weight_decay": 0.1, "optimizer": case.rule}
    settings |= {"clip_grad": case.clip, "log_num_zeros_in_grad": case.zeros}
    settings |= {"grad_norm_skip_threshold": case.threshold}
    settings |= {precision: True} if precision != "fp32" else {}
    settings |= {"initial_loss_scale": 2.0**8, "hysteresis": 1} if precision == "fp16" else {}
    settings |= dict(case.settings) | dict(layout.settings)
    settings |= {"use_precision_aware_optimizer": True, **FORMS[form]} if form else {}
    if settings.get("muon_scalar_optimizer", case.rule) not in ("adam", "lamb"):
        settings.pop("exp_avg_sq_dtype", None)  # there is one moment
    if layout.fraction:
        settings |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": layout.fraction,
            "offload_mode": layout.mode,
            **PLACES[layout.place],
        }
    if RULES[case.rule].reads == "elements" and case.seed % 2:
        settings |= {"audit_rate": 1.0, "audit_action": "raise"}
    if layout.kind == "copies":
        settings["use_distributed_optimizer"] = True
    return OptimizerConfig(**settings)


def perform(case: Case, phase: int, rank: int, folder: str) -> Outcome:
    outcome, began = Outcome(), time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _perform(case, phase, rank, folder, outcome)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-5)}"
    outcome.seconds = time.monotonic() - began
    return outcome


def _perform(case: Case, phase: int, rank: int, folder: str, outcome: Outcome) -> None:
    layout = case.layouts[phase]
    run = _Run(case, layout, rank, outcome)
    if phase:
        outcome.stage = "checkpoint"
        checkpoint.load(folder, run.model, run.optimizer)
    run.train(case.phase(phase))
    if case.tenants:
        run.host_tenants(phase)
    if phase == 0 and case.shrinks:
        outcome.stage = "checkpoint"
        run.save_alone(folder)
    if phase == 0 and len(case.layouts) > 1:
        outcome.stage = "checkpoint"
        saved = checkpoint.save(folder, run.model, run.optimizer, asynchronous=case.background)
        if case.background:
            saved.wait()
    outcome.stage = "reading"
    run.read()
    gone = weakref.ref(run.optimizer)
    del run.optimizer
    assert gone() is None, "a deleted optimizer waits for the garbage collector"
    outcome.stage = ""


class _Run:
    def __init__(self, case: Case, layout: Layout, rank: int, outcome: Outcome) -> None:
        self.case, self.layout, self.outcome = case, layout, outcome
        self.place, self.rank = Place(case, layout, rank), rank
        outcome.stage = "model"
        names, sizes = ([name for name, _ in layout.mesh], tuple(size for _, size in layout.mesh))
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names)) if names else None
        self.model = self._model()
        outcome.stage = "optimizer"
        groups = None
        if layout.kind == "copies" and (names != ["dp"] or case.seed % 2):
            groups = ProcessGroups.from_device_mesh(self.mesh)
        config = config_of(case, layout)
        if self._differs("clip_grad", -1):
            config.clip_grad = 0.125
        if self._differs("lr when built", -1):
            config.lr = 2.0**-5
        for what, others in OTHER_SETTINGS.items():
            if self._differs(what, -1):
                vars(config).update(others)
        if case.overrides:
            self.optimizer: Any = by_class.built(case, layout, self.model, PLACES[layout.place])
        else:
            self.optimizer = get_megatron_optimizer(config, self.model, process_groups=groups)

    def _differs(self, what: str, step: int) -> bool:
        odd = self.case.disagreement
        return odd is not None and (odd.what, odd.rank, odd.step) == (what, self.rank, step)

    # -- the model --------------------------------------------------------------------------------

    def _each(self) -> Iterator[tuple[Layer, Param, str]]:
        for layer in self.case.layers:
            if self.place.holds(layer):
                for param in layer.params:
                    yield layer, param, f"{layer.name}.{param.name}"

    def _model(self) -> Network:
        values = {
            name: self._localised(layer, param, initial(self.case, layer, param))
            for layer, param, name in self._each()
        }
        model = Network(self.case, values)
        for _, param, name in self._each():
            if self.place.cuts(param):
                tensor: Any = model.get_parameter(name)
                tensor.tensor_model_parallel, tensor.partition_dim = True, param.splits
        if self.layout.kind == "fsdp":
            self._fully_shard(model)
        return model

    def _localised(self, layer: Layer, param: Param, whole: Tensor) -> Tensor:
        if self.layout.kind == "placed":
            assert self.mesh is not None
            return distribute_tensor(
                whole, self.mesh, placements_of(self.layout, layer, param), src_data_rank=None
            )
        if self.layout.kind == "fsdp" and self.mesh is not None:
            where = self._before_fsdp(layer, param, whole)
            return (
                distribute_tensor(
                    whole, self.mesh[tuple(where)], list(where.values()), src_data_rank=None
                )
                if where
                else whole
            )
        return self.place.part(param, whole)

    def _before_fsdp(self, layer: Layer, param: Param, whole: Tensor) -> dict[str, Placement]:
        where: dict[str, Placement] = {}
        if "ep" in self.place.at and layer.is_expert:
            where["ep"] = Shard(0)  # a stack of experts
        if "tp" in self.place.at:
            even = (
                param.splits is not None and whole.shape[param.splits] % self.layout.size("tp") == 0
            )
            even = even and ("ep" not in where or param.splits != 0)  # FSDP2 has no empty parts
            where["tp"] = Shard(param.splits) if even and param.splits is not None else Replicate()
        return where

    def _fully_shard(self, model: Network) -> None:
        assert self.mesh is not None
        names = tuple(name for name, _ in self.layout.mesh if name != "tp")
        experts = self.mesh[tuple(name for name in names if name != "ep")]
        dense: DeviceMesh = self.mesh[names]._flatten() if "ep" in names else experts
        for layer in self.case.layers:
            fully_shard(model.part(layer), mesh=experts if layer.is_expert else dense)
        fully_shard(model, mesh=dense)

    # -- training ---------------------------------------------------------------------------------

    def train(self, steps: range) -> None:
        published = None
        if self.case.publishes:
            published = Published(self.case, self.optimizer, self.place.part)
        for step in steps:
            self.outcome.stage, self.outcome.step = "training", step
            self._before(step)
            self.outcome.losses.append(
                [self._backward(step, part) for part in range(self.case.parts)]
            )
            result = self.optimizer.step() or self.optimizer.last_step  # a class returns no result
            self.outcome.norms.append(result.grad_norm)
            self.outcome.successes.append(bool(result.success))
            self.outcome.zeros.append(result.num_zeros_in_grad)
            if self.case.late:
                self._backward(step, self.case.parts - 1)
            if published is not None and step in self.case.publishes:
                published.publish()
                params = self.model.get_parameter
                published.check_params(
                    {name: (param, params(name)) for _, param, name in self._each()}
                )
        self.outcome.step = -1

    def _before(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 ** (step in self.case.halve_lr)
        if self._differs("lr", step):
            self.optimizer.param_groups[-1]["lr"] *= 0.75
        if self._differs("clip_grad later", step):
            self.optimizer.config.clip_grad = 0.125
        if self._differs("zeros later", step):
            self.optimizer.config.log_num_zeros_in_grad = True
        if step in self.case.averaged:
            with self.optimizer.averaged_weights():
                pass
        if step in self.case.scaled:
            factors = dict(self._factors())
            if self._differs("factors", step):
                factors = {name: of_rows * 0.5 for name, of_rows in factors.items()}
            self.optimizer.scale_rows_(factors)
        if step in self.case.written:
            self._finish_sync()
            for param in self.model.parameters():
                halve(param)
        if not self._differs("zero_grad", step):
            self.optimizer.zero_grad()
        if self._differs("dies", step):
            os.abort()
        if self._differs("sleeps", step):
            time.sleep(3600.0)
        if self._differs("freeze", step):
            next(
                p for group in self.optimizer.param_groups for p in group["params"]
            ).requires_grad_(False)

    def _finish_sync(self) -> None:
        getattr(self.optimizer, "finish_param_sync", lambda: None)()

    def _factors(self) -> Iterator[tuple[str, Tensor]]:
        for _, param, name in self._each():
            if param.shape and not param.frozen:
                of_rows = row_factors(param.shape[0])
                if self.place.cuts(param) and param.splits == 0:
                    of_rows = self.place.part(param, of_rows)
                yield name, of_rows

    def _weights(self, step: int, part: int) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        everybody = range(self.case.streams)
        for layer in filter(self.place.holds, self.case.layers):
            streams = self.place.streams(layer)
            alike = self.layout.kind == "fsdp"  # FSDP2 wants all ranks to use the same units
            if not used(self.case, layer, step, everybody if alike else streams):
                continue
            found[layer.name] = {
                param.name: self._weight(layer, param, (layer, param), step, part, streams)
                for param in layer.params
            }
            if layer.tied_to:
                other = next(each for each in self.case.layers if each.name == layer.tied_to)
                tied = Param("tied", other.params[0].shape)
                found[layer.name]["tied"] = self._weight(
                    layer, tied, (other, other.params[0]), step, part, streams
                )
        return found

    def _weight(
        self,
        layer: Layer,
        param: Param,
        owner: tuple[Layer, Param],
        step: int,
        part: int,
        streams: list[int],
    ) -> Tensor:
        whole = gradient(self.case, layer, param, step, part, streams) * self.place.factor(layer)
        local = self._localised(*owner, whole)
        return local.to_local() if isinstance(local, DTensor) else local

    def _backward(self, step: int, part: int) -> float | None:
        deferred = self.case.deferred and part < self.case.parts - 1
        if self.layout.kind == "fsdp":
            self.model.set_requires_gradient_sync(not deferred)  # type: ignore[operator]
        can_defer = deferred and hasattr(self.optimizer, "no_sync")
        with self.optimizer.no_sync() if can_defer else contextlib.nullcontext():
            loss = self.model(self._weights(step, part))
            if not loss.requires_grad:
                return None
            self.optimizer.scale_loss(loss).backward()
        return float(loss.item())

    def host_tenants(self, phase: int) -> None:
        """Step copies of this rank's parameters as tenants, and compare them with runs alone."""
        values: dict[str, dict[str, Tensor]] = {"even": {}, "odd": {}}
        for number, (_, _, name) in enumerate(self._each()):
            values[("even", "odd")[number % 2]][name] = self.model.get_parameter(name)
        tenants.compare_with_runs_alone(values, self.case.seed + phase)

    def save_alone(self, folder: str) -> None:
        """Let all ranks but the last save, as if it had ended: the save is refused, or it is whole.
        A whole one loads in one process."""
        alone = dist.new_group(list(range(self.layout.ranks - 1 or 1)))
        if self.rank >= (self.layout.ranks - 1 or 1):
            return
        path = f"{folder}/alone"
        try:
            version = checkpoint.save(path, self.model, self.optimizer, process_group=alone)
        except ValueError as error:
            if "the ranks that save hold" not in str(error):
                raise
            return
        saved = set(read_index(version, read_manifest(version)).entries)
        slots = self.optimizer.slots()
        keys = [
            entry_name(key, self.optimizer.slot_name(slot))
            for slot in slots
            for key in self.optimizer.slot_state(slot)
        ]
        if missing := sorted(set(keys) - saved):
            raise AssertionError(f"a save of some ranks lacks {missing[:4]}")

    # -- reading ----------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self) -> None:
        self._finish_sync()
        tensors = self.outcome.tensors
        if self.optimizer.config.ema_decay is not None:
            with self.optimizer.averaged_weights():
                self._read_model("averaged")
        self._read_model("model")
        for part in self.optimizer.chained_optimizers:
            group = part.process_groups.dp
            for name, main in part.named_main_params():
                tensors[f"main/{name}"] = _whole(main, group)
            for slot in part.slots():
                for key, value in sorted(part.full_slot_state(slot).items()):
                    tensors[f"state/{part.slot_name(slot)}/{key}"] = _whole(
                        torch.as_tensor(value), group
                    )
        digest = self.optimizer.step_digest(sample=1, per_tensor=True)
        self.outcome.digest = digest.per_tensor

    def _read_model(self, kind: str) -> None:
        for name, param in self.model.named_parameters():
            self.outcome.tensors[f"{kind}/{name}"] = _whole(param, None)


def halve(param: Tensor) -> None:
    local = param.to_local() if isinstance(param, DTensor) else param
    local.data.mul_(0.5)


def _whole(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if isinstance(tensor, FlatShard):
        return tensor.full_tensor(group)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def same_number(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b))
