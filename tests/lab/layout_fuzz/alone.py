"""The expected outcome: one process steps the sum of all gradients."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.layout_fuzz.by_class import groups_by_hand
from lab.layout_fuzz.case import Case, Layer, Layout, Param
from lab.layout_fuzz.holding import Place
from lab.layout_fuzz.model import Network, dtype_of, gradient, initial, row_factors, used
from lab.layout_fuzz.running import Outcome, config_of, halve
from mp_optim import get_megatron_optimizer


def expected(case: Case) -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Alone(case).run()


@dataclass
class _Sum:
    tensor: Any
    sources: list[tuple[Layer, Param]]


class _Alone:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Network(
            case,
            {
                f"{layer.name}.{param.name}": initial(case, layer, param)
                for layer in case.layers
                for param in layer.params
            },
        )
        groups = groups_by_hand(case, self.model) if case.overrides else None
        self.optimizer: Any = get_megatron_optimizer(
            config_of(case, Layout("alone")), self.model, param_groups=groups
        )
        self.sums: dict[int, _Sum] = {}
        for layer in case.layers:
            for param in layer.params:
                tensor = self.model.part(layer).get_parameter(param.name)
                self.sums[id(tensor)] = _Sum(tensor, [(layer, param)])
        for layer in case.layers:
            if layer.tied_to:
                tensor = self.model.part(layer).get_parameter("tied")
                self.sums[id(tensor)].sources.append((layer, Param("tied", tuple(tensor.shape))))

    def run(self) -> list[Outcome]:
        found = []
        for index, layout in enumerate(self.case.layouts):
            outcome = Outcome()
            for step in self.case.phase(index):
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.5 ** (step in self.case.halve_lr)
                if step in self.case.scaled:
                    self.optimizer.scale_rows_(self._factors())
                if step in self.case.written:
                    for param in self.model.parameters():
                        halve(param)
                outcome.losses.append(self._losses(step, layout))
                self._set_gradients(step, layout)
                result = self.optimizer.step()
                outcome.norms.append(result.grad_norm)
                outcome.successes.append(bool(result.success))
                outcome.zeros.append(result.num_zeros_in_grad)
            self._read(outcome)
            found.append(outcome)
        return found

    def _factors(self) -> dict[str, Tensor]:
        return {
            f"{layer.name}.{param.name}": row_factors(param.shape[0])
            for layer in self.case.layers
            for param in layer.params
            if param.shape and not param.frozen
        }

    @torch.no_grad()
    def _losses(self, step: int, layout: Layout) -> list[Any]:
        if not layout.has_whole_model:
            return []
        found = []
        for rank in range(layout.data_ranks):
            place = Place(self.case, layout, rank)
            found.append([self._loss(place, step, part) for part in range(self.case.parts)])
        return found

    def _loss(self, place: Place, step: int, part: int) -> float | None:
        weights: dict[str, dict[str, Tensor]] = {}
        for layer in self.case.layers:
            streams = place.streams(layer)
            if used(self.case, layer, step, streams):
                weights[layer.name] = {
                    param.name: gradient(self.case, layer, param, step, part, streams)
                    * place.factor(layer)
                    for param in self._params(layer)
                }
        trained = [
            self.model.get_submodule(name).get_parameter(param).requires_grad
            for name, each in weights.items()
            for param in each
        ]
        return float(self.model(weights)) if any(trained) else None

    def _params(self, layer: Layer) -> tuple[Param, ...]:
        if not layer.tied_to:
            return layer.params
        return (
            *layer.params,
            Param("tied", tuple(self.model.part(layer).get_parameter("tied").shape)),
        )

    def _set_gradients(self, step: int, layout: Layout) -> None:
        scale = float(self.optimizer.get_loss_scale())
        self.optimizer.zero_grad()
        for each in self.sums.values():
            if not each.tensor.requires_grad:
                continue
            anybody = any(
                used(self.case, layer, step, range(self.case.streams)) for layer, _ in each.sources
            )
            each.tensor.main_grad = None
            if not anybody and layout.kind != "copies":
                continue  # nobody's gradient is zero where gradients are reduced
            total = (
                self._in_order(each, step, layout, scale)
                if self.case.rough
                else self._exact(each, step) * scale
            )
            if total.dtype == each.tensor.dtype or not self.case.rough:
                each.tensor.grad = total.to(each.tensor.dtype)
            else:
                each.tensor.main_grad = total

    def _exact(self, each: _Sum, step: int) -> Tensor:
        total = torch.zeros(each.tensor.shape)
        for layer, param in each.sources:
            for part in range(self.case.parts):
                total += gradient(self.case, layer, param, step, part, range(self.case.streams))
        return total

    def _in_order(self, each: _Sum, step: int, layout: Layout, scale: float) -> Tensor:
        own, kept = dtype_of(self.case, each.sources[0][0]), each.tensor.dtype
        kept = torch.float32 if layout.setting("grad_reduce_in_fp32") else kept
        total = torch.zeros(each.tensor.shape)
        for rank in range(layout.data_ranks):
            place, mine = (
                Place(self.case, layout, rank),
                torch.zeros(each.tensor.shape, dtype=kept),
            )
            for part in range(self.case.parts):
                passes = [
                    gradient(self.case, layer, param, step, part, place.streams(layer)) * scale
                    for layer, param in each.sources
                ]
                mine += sum(one.to(own) for one in passes)
            total += mine
        divisor = 1 if layout.setting("grad_reduce_op") == "sum" else layout.data_ranks
        return (total / divisor).to(kept)

    @torch.no_grad()
    def _read(self, outcome: Outcome) -> None:
        for name, param in self.model.named_parameters():
            outcome.tensors[f"model/{name}"] = param.detach().clone()
        for name, main in self.optimizer.named_main_params():
            outcome.tensors[f"main/{name}"] = main.detach().clone()
        for slot in self.optimizer.slots():
            name, state = (self.optimizer.slot_name(slot), self.optimizer.full_slot_state(slot))
            for key, value in state.items():
                outcome.tensors[f"state/{name}/{key}"] = torch.as_tensor(value).clone()
            if "averaged_param" in state and state["step"] > 0:
                average = state["averaged_param"].to(self.model.get_parameter(name).dtype)
                outcome.tensors[f"averaged/{name}"] = average.clone()
        digest = self.optimizer.step_digest(sample=1, per_tensor=True)
        outcome.digest = digest.per_tensor
