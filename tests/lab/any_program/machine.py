"""AnyProgram: the operations that programs are made of, each carried out and compared with the
oracle."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from lab import tenants
from lab.any_program import amp, breaking, classes, gradients, leaving, nonsense, writes
from lab.any_program.arithmetic import F
from lab.any_program.operations import operation
from lab.any_program.oracle import Group, Slot
from lab.any_program.program import Program
from lab.any_program.setups import PARAMS, REMAINDERS, SETTINGS, Param, Place, Settings, places
from lab.any_program.starting import settings_of
from lab.any_program.subject import (
    as_tensor,
    dtype_of,
    expect_bits,
    name_of,
    need,
    random_values,
    refused,
)
from mp_optim import OptimizerParamScheduler
from mp_optim.kernels.native_library import set_host_threads
from support.moved_by_hand import HELPERS

INDEX = st.integers(0, 5)
SEED = st.integers(0, 99)


class AnyProgram(Program):
    """A program of any of these operations."""

    # -- steps ------------------------------------------------------------------------------------

    @operation(
        seed=SEED,
        micro=st.integers(1, 3),
        unused=st.sets(INDEX, max_size=2),
        hold=st.booleans(),
        size=st.sampled_from(gradients.SIZES),
    )
    def train(self, seed: int, micro: int, unused: set[int], hold: bool, size: str) -> None:
        """zero_grad, backward and step."""
        self.subject.optimizer.zero_grad()
        self.go_backward(seed, micro, unused, hold, size)
        self.take_step(closure=False)

    @operation(seed=SEED, unused=st.sets(INDEX, max_size=3), size=st.sampled_from(gradients.SIZES))
    def backward(self, seed: int, unused: set[int], size: str) -> None:
        """Gradients that are added to those that are there."""
        self.go_backward(seed, 1, unused, False, size)

    @operation(kinds=st.lists(st.sampled_from(gradients.KINDS), min_size=1, max_size=6), seed=SEED)
    def hand(self, kinds: list[str], seed: int) -> None:
        """Gradients made by hand."""
        self.subject.optimizer.get_loss_scale()
        for index, (name, param) in enumerate(self.subject.params()):
            if param.requires_grad and name in self.oracle.slots:
                gradients.put(param, kinds[index % len(kinds)], seed + index)

    @operation(index=INDEX, how=st.sampled_from(gradients.CHANGES))
    def touch(self, index: int, how: str) -> None:
        """Change a gradient between backward and step."""
        self.only(f"touch:{how}")
        param = self.subject.model.param(self.pick(index).name)
        need(param.grad is not None)
        gradients.own_memory(self.subject)
        gradients.change(param, how)
        if how in gradients.UNTRACED:
            self.subject.optimizer.discard_backward_work()

    @operation(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        gradients.own_memory(self.subject)
        self.subject.optimizer.zero_grad(set_to_none=to_none)
        for _, param in self.subject.params():
            if getattr(param, "main_grad", None) is not None:
                del param.main_grad  # it belongs to whoever made it

    @operation(closure=st.booleans())
    def step(self, closure: bool) -> None:
        self.take_step(closure)

    @operation(seed=SEED, mode=st.sampled_from(amp.MODES), size=st.sampled_from(gradients.SIZES))
    def train_amp(self, seed: int, mode: str, size: str) -> None:
        self.only(f"train_amp:{mode}")
        need(self.setup.precision != "fp16")
        if self.amp is None:
            self.amp = amp.new_scaler()
        amp.train(self.subject, self.oracle, self.amp, seed, mode, size)

    # -- outside writes ---------------------------------------------------------------------------

    @operation(
        index=INDEX,
        how=st.sampled_from(writes.WRITERS),
        kind=st.sampled_from(writes.VALUES),
        seed=SEED,
    )
    def write(self, index: int, how: str, kind: str, seed: int) -> None:
        """Other code writes values, with or without a trace."""
        self.only(f"write:{how}")
        slot = self.pick(index)
        values = writes.values(self.subject, slot, kind, seed)
        fresh = as_tensor(values, slot.shape, slot.dtype)
        writes.write(self.subject.model.param(slot.name), fresh, how)
        self.oracle.wrote(slot.name, values)

    @operation(index=INDEX)
    def turn(self, index: int) -> None:
        slot = self.pick(index)
        self.oracle.wrote(slot.name, writes.turn(self.subject, slot))

    @operation(index=INDEX, seed=SEED)
    def cut(self, index: int, seed: int) -> None:
        """A parameter that is shorter than it was is refused by the step, which changes nothing."""
        slot = self.pick(index)
        param = self.subject.model.param(slot.name)
        need(param.dim() and param.shape[0] > 1 and param.requires_grad)
        self.subject.optimizer.zero_grad()
        whole = param.data
        param.data = whole[:1]
        self.go_backward(seed, 1, set(), False, "normal")
        with refused(slot.name):
            self.subject.optimizer.step()
        param.grad, param.data = None, whole
        self.subject.optimizer.zero_grad()
        self.oracle.follow()

    @operation(index=INDEX, seed=SEED, all_of_them=st.booleans())
    def scale_rows(self, index: int, seed: int, all_of_them: bool) -> None:
        """Rows of main params times factors."""
        first, slots = self.pick(index), self.oracle.slots.values()
        chosen = [slot for slot in slots if all_of_them or slot is first]
        chosen = [slot for slot in chosen if slot.bound and slot.shape]
        need(chosen)
        factors = {
            slot.name: 0.5 + np.random.RandomState(seed).rand(slot.shape[0]).astype(F)
            for slot in chosen
        }
        self.leave()
        self.subject.optimizer.scale_rows_(
            {name: torch.from_numpy(value) for name, value in factors.items()}
        )
        for name, value in factors.items():
            self.oracle.scale_rows(name, value)

    @operation(
        index=INDEX, value=st.sampled_from((float("nan"), float("inf"), "rows", "name", "half"))
    )
    def refuse_rows(self, index: int, value: Any) -> None:
        """Factors that cannot be meant are refused, and nothing has changed."""
        self.only(f"refuse_rows:{value}")
        slot = self.pick(index)
        need(slot.bound and slot.shape and slot.shape[0])
        self.leave()
        factors = torch.full(slot.shape[:1], value if type(value) is float else 2.0)
        given = {slot.name: factors if value != "rows" else factors.repeat(2)}
        if value == "name":
            given["dense.unknown"] = factors
        elif value == "half":
            given[slot.name] = factors.to(torch.int64)
        with refused():
            self.subject.optimizer.scale_rows_(given)
        self.subject.check_state_dict(self.oracle, self.subject.optimizer.state_dict())

    @operation(what=st.sampled_from(("step", "rows", "load")), line=st.integers(0, 1500), seed=SEED)
    def interrupt(self, what: str, line: int, seed: int) -> None:
        """A signal somewhere in a call."""
        self.only(f"interrupt:{what}")
        self.leave()
        need(all(slot.bound for _, slot in self.oracle.order()))
        subject, then = self.subject, copy.deepcopy(self.oracle)
        subject.optimizer.zero_grad()
        state = copy.deepcopy(subject.optimizer.state_dict())
        calls = {"step": lambda: subject.optimizer.step()}
        calls["load"] = lambda: subject.optimizer.load_state_dict(state)
        factors = {
            slot.name: torch.full(slot.shape[:1], 0.5)
            for _, slot in self.oracle.order()
            if slot.shape
        }
        calls["rows"] = lambda: subject.optimizer.scale_rows_(factors)
        if what == "step":
            self.go_backward(seed, 1, set(), False, "normal")
            then.step(subject.own_grads(self.oracle), subject.place)
        elif what == "rows":
            for name, value in factors.items():
                then.scale_rows(name, value.numpy())
        held = breaking.interrupted(subject, self.oracle, calls[what], then, line)
        self.oracle = held
        subject.optimizer.zero_grad()

    # -- other optimizers -------------------------------------------------------------------------

    @operation(
        rule=st.sampled_from(tuple(classes.CLASSES)),
        params=st.lists(PARAMS, min_size=1, max_size=4),
        place=places("bf16"),
        form=st.sampled_from(tuple(classes.FORMS)),
        choice=st.integers(0, 4 * len(classes.OVERRIDES) - 1),
        seed=SEED,
    )
    def override(
        self, rule: str, params: list[Param], place: Place, form: str, choice: int, seed: int
    ) -> None:
        """Settings by pattern at a class, in one of four draws."""
        need(choice < len(classes.OVERRIDES))
        classes.train(rule, params, replace(place, form=form), choice, seed)

    @operation(
        first=st.lists(PARAMS, min_size=1, max_size=3),
        second=st.lists(PARAMS, min_size=1, max_size=3),
        rare=st.integers(0, 3),
        seed=SEED,
    )
    def host_tenants(self, first: list[Param], second: list[Param], rare: int, seed: int) -> None:
        """Tenants of one optimizer, in one of four draws."""
        need(rare == 0)
        values: dict[str, dict[str, Tensor]] = {"first": {}, "second": {}}
        for found, params in zip(values.values(), (first, second), strict=True):
            for index, param in enumerate(params):
                dtype = dtype_of(param, "bf16")
                drawn = random_values(seed + index, param.shape, dtype).reshape(-1)
                found[f"w{index}"] = as_tensor(drawn, param.shape, dtype, param.transposed)
        tenants.compare_with_runs_alone(values, seed)

    @operation(full=st.sampled_from((False, False, True)))
    def publish_changes(self, full: bool) -> None:
        """A copy of the weights takes what changed since the last time."""
        self.publish(full)

    @operation(fails=st.booleans())
    def average(self, fails: bool) -> None:
        """Averages in the place of the weights, for a block that may fail."""
        need(self.oracle.ema is not None)
        self.leave()
        optimizer = self.subject.optimizer
        with contextlib.suppress(ZeroDivisionError), optimizer.averaged_weights():
            for _, slot in self.oracle.order():
                param = self.subject.model.param(slot.name)
                expected = self.oracle.averaged(slot)
                expect_bits(f"average of {slot.name}", param, expected)
            if fails:
                raise ZeroDivisionError

    @operation(
        index=INDEX,
        how=st.sampled_from(writes.WAYS),
        kind=st.sampled_from(writes.VALUES),
        seed=SEED,
    )
    def replace_param(self, index: int, how: str, kind: str, seed: int) -> None:
        """Another tensor where a parameter was."""
        self.only(f"replace_param:{how}")
        slot = self.pick(index)
        values = writes.values(self.subject, slot, kind, seed)
        transposed = self.transposed[slot.name] ^ (seed % 2 == 1)
        fresh = as_tensor(values, slot.shape, slot.dtype, transposed)
        writes.replace(self.subject, slot, fresh, how)
        self.oracle.wrote(slot.name, values)

    @operation()
    def reload(self) -> None:
        self.subject.optimizer.reload_model_params()
        self.oracle.reload()

    @operation(index=INDEX, frozen=st.booleans())
    def freeze(self, index: int, frozen: bool) -> None:
        self.subject.model.param(self.pick(index).name).requires_grad_(not frozen)

    # -- groups and settings ----------------------------------------------------------------------

    @operation(param=PARAMS, settings=SETTINGS, left_out=st.booleans())
    def add_group(self, param: Param, settings: Settings, left_out: bool) -> None:
        """A group of a new parameter, or of one that was left out because it was frozen."""
        model = self.subject.model
        if left_out and self.oracle.outside:
            name = min(self.oracle.outside)
            values = self.oracle.outside.pop(name)
            tensor = model.param(name).requires_grad_(True)
            dtype = "fp32" if tensor.dtype == torch.float32 else self.setup.precision
            slot = Slot(name, tuple(tensor.shape), dtype, values)
        else:
            name = name_of(self.serial, param)
            slot = self.new_param(model, name, param, 50 + self.serial)
            self.serial += 1
        expert = name.startswith("experts")
        group = Group([name], expert, settings_of(self.setup, settings, explicit=True))
        self.oracle.slots[name] = slot
        self.oracle.add_group(group)
        self.oracle.keep_slot_as(slot, self.subject.place)
        self.subject.add_group(group)

    @operation(
        index=INDEX,
        setting=st.sampled_from(("lr", "weight_decay", "betas", "eps", "clip", "threshold")),
        given=SETTINGS,
        limit=st.sampled_from((1.0, 0.0, 0.01, 1e6)),
    )
    def set(self, index: int, setting: str, given: Settings, limit: float) -> None:
        """Another setting."""
        if setting == "clip":
            self.oracle.clip = self.subject.optimizer.config.clip_grad = limit
        elif setting == "threshold":
            limit = limit or float("inf")
            self.oracle.threshold = self.subject.optimizer.config.grad_norm_skip_threshold = limit
        else:
            group = self.oracle.groups[index % len(self.oracle.groups)]
            need(setting in group.settings)
            value = getattr(given, setting)
            group.settings[setting] = self.subject.live_group(group)[setting] = value
            group.tensor = group.tensor and setting != "lr"

    @operation(index=INDEX, value=st.sampled_from((1, "text", 0.5, None)))
    def key(self, index: int, value: Any) -> None:
        group = self.oracle.groups[index % len(self.oracle.groups)]
        group.settings["note"] = self.subject.live_group(group)["note"] = value

    @operation(index=INDEX, key=st.sampled_from(("maximize", "amsgrad")), seed=SEED)
    def torchs_key(self, index: int, key: str, seed: int) -> None:
        """A setting of torch's in a group is refused by name, and can be taken back."""
        self.only(f"torchs_key:{key}")
        need(self.oracle.rule != "foreign")
        group = self.oracle.groups[index % len(self.oracle.groups)]
        live = self.subject.live_group(group)
        self.subject.optimizer.zero_grad()
        self.go_backward(seed, 1, set(), False, "normal")
        need(self.subject.own_grads(self.oracle).keys() & set(group.names))
        live[key] = True
        with refused(key):
            self.subject.optimizer.step()
        del live[key]
        self.oracle.follow()

    @operation(kind=st.sampled_from(tuple(nonsense.GROUPS)), index=INDEX)
    def refuse_group(self, kind: str, index: int) -> None:
        """A group that cannot be added is refused, and nothing has changed."""
        self.only(f"refuse_group:{kind}")
        self.leave()
        nonsense.add_group(self.subject, self.oracle, kind, self.pick(index))

    @operation(value=st.sampled_from((0.5, 0.0, 0.001)), shared=st.booleans())
    def tensor_lr(self, value: float, shared: bool) -> None:
        """Learning rates in tensors; filled where there are some, as graphed loops do."""
        one = torch.tensor(value)
        for group in self.oracle.groups:
            live = self.subject.live_group(group)
            if group.tensor:
                live["lr"].fill_(value)
            else:
                live["lr"] = one if shared else torch.tensor(value)
            group.tensor, group.settings["lr"] = True, float(one)

    @operation(increment=st.integers(0, 4))
    def schedule(self, increment: int) -> None:
        """A scheduler's step; its numbers are its own tests' affair."""
        if self.scheduler is None:
            self.scheduler = OptimizerParamScheduler(
                self.subject.optimizer, 0.0, 0.01, 0.0, 2, 12, "cosine", 0.0, 0.1, 10, "linear"
            )
        self.scheduler.step(increment)
        for group in self.oracle.groups:
            live = self.subject.live_group(group)
            group.settings |= {"lr": float(live["lr"]), "weight_decay": float(live["weight_decay"])}

    @operation(
        how=st.sampled_from(("threads", "park", "numbers", "flush")), count=st.integers(1, 3)
    )
    def between(self, how: str, count: int) -> None:
        if how == "threads":
            torch.set_num_threads(count)
            set_host_threads(count)
        elif how == "flush":
            self.subject.flushes = not self.subject.flushes
        elif how == "park":
            self.subject.optimizer.offload_to_cpu()
            self.subject.optimizer.restore_from_cpu()
        else:
            assert (
                str(self.subject.optimizer.describe())
                and self.subject.optimizer.metrics()["steps"] >= 0
            )

    @operation(index=INDEX, halves=st.booleans())
    def assign(self, index: int, halves: bool) -> None:
        """State by hand: all of it is moved to the host and back, as programs do that give its
        memory to others for a while; and moments are given half of their values."""
        need(self.oracle.rule != "foreign")
        self.leave()
        optimizer, slot = self.subject.optimizer, self.pick(index)
        for helper in HELPERS.values():
            helper(optimizer, torch.device("cpu"))
        if halves and slot.bound:
            state = optimizer.state[self.subject.model.param(slot.name)]
            for name in self.oracle.moment_names(slot):
                state[name] = state[name] * 0.5
                self.oracle.give_moment(slot, name, slot.moments[name].values() * F(0.5))

    @operation(
        index=INDEX,
        number=st.integers(0, 2),
        how=st.sampled_from(writes.OF_STATE),
        held=st.booleans(),
        trains=st.booleans(),
        seed=SEED,
    )
    def edit_state(
        self, index: int, number: int, how: str, held: bool, trains: bool, seed: int
    ) -> None:
        """A moment is written in place, or is given other memory; through a tensor of now, or one
        that the program has kept since an earlier edit; between steps in a row, or anywhere."""
        self.only(f"edit_state:{how}")
        need(self.oracle.rule != "foreign")
        need(how != "data.mul" or not self.setup.audit)  # an audit takes it for a memory fault
        for step in range(2 if trains else 0):
            self.subject.optimizer.zero_grad()
            self.go_backward(seed + step, 1, set(), False, "normal")
            self.take_step(closure=False)
        self.leave()
        slot = self.pick(index)
        names = self.oracle.moment_names(slot)
        need(slot.bound and names and slot.model.size)
        name = names[number % len(names)]
        where, is_copy = (self.subject, slot.name, name), slot.moments[name].scales is not None
        tensor = self.kept_state.get(where) if held and not is_copy else None
        state = self.subject.optimizer.state[self.subject.model.param(slot.name)]
        if tensor is None:
            tensor = state[name]
        values = writes.of_moment(slot.moments[name].values(), how, seed, tensor.dtype)
        if is_copy:  # A moment in few bits is shown as a copy that is read-only.
            state[name] = torch.from_numpy(values.copy()).view(tensor.shape)
        else:
            writes.write_state(tensor, values, how)
        self.oracle.give_moment(slot, name, values)
        if held and not is_copy:
            self.kept_state[where] = tensor
        if trains:
            self.subject.optimizer.zero_grad()
            self.go_backward(seed + 2, 1, set(), False, "normal")
            self.take_step(closure=False)
            self.leave()
            leaving.look(self.subject, self.oracle, "state_dict")

    @operation(index=INDEX, how=st.sampled_from(writes.RESETS))
    def reset_state(self, index: int, how: str) -> None:
        """State is taken away, of one parameter or of all."""
        self.only(f"reset_state:{how}")
        self.leave()
        slot = self.pick(index)
        is_of_all = writes.reset(self.subject, slot, how)
        for each in self.oracle.slots.values() if is_of_all else [slot]:
            self.oracle.begin_again(each)

    # -- state leaves and comes -------------------------------------------------------------------

    @operation(how=st.sampled_from(leaving.LOOKS))
    def look(self, how: str) -> None:
        """State leaves by one of its doors."""
        self.only(f"look:{how}")
        self.leave()
        leaving.look(self.subject, self.oracle, how)

    @operation(how=st.sampled_from(leaving.WAYS), place=places("bf16"), seed=SEED)
    def resume(self, how: str, place: Place, seed: int) -> None:
        """Save, and go on in a new model and optimizer somewhere else."""
        self.only(f"resume:{how}")
        if self.setup.precision != "bf16" and place.form in REMAINDERS:
            place = replace(place, form="8bit")
        self.leave()
        self.scheduler = None
        frozen = seed % 2 == 1 and "resume:frozen" not in self.without
        if self.oracle.rule == "foreign":
            place = replace(place, form="plain")
        self.subject = leaving.resumed(
            self.subject, self.oracle, how, place, seed, self.transposed, frozen
        )
        self.track()

    @operation()
    def remember(self) -> None:
        """Keep a copy of all state."""
        self.leave()
        self.remembered = (
            copy.deepcopy(self.subject.model.state_dict()),
            copy.deepcopy(self.subject.optimizer.state_dict()),
            copy.deepcopy(self.oracle),
        )

    @operation()
    def rewind(self) -> None:
        """Go back to it, in the optimizer that is there."""
        need(self.remembered is not None)
        assert self.remembered is not None
        model, state, oracle = self.remembered
        need(
            [group.names for group in oracle.groups]
            == [group.names for group in self.oracle.groups]
        )
        need(
            all(slot.bound == self.oracle.slots[name].bound for name, slot in oracle.slots.items())
        )
        leaving.rewound(
            self.subject, self.oracle, copy.deepcopy(model), copy.deepcopy(state), oracle
        )

    @operation(kind=st.sampled_from(nonsense.KINDS), index=INDEX)
    def load_nonsense(self, kind: str, index: int) -> None:
        """A state dict that cannot be loaded is refused, and nothing has changed."""
        self.only(f"load_nonsense:{kind}")
        self.leave()
        nonsense.load(self.subject, self.oracle, kind, self.pick(index))
