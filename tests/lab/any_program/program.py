"""The model, the optimizer and the oracle of a program."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize
from torch import Tensor, nn
from torch.amp import GradScaler

from lab.any_program import leaving, stepping
from lab.any_program.oracle import Oracle, Slot
from lab.any_program.publishing import Published
from lab.any_program.setups import Param, Setup, setups
from lab.any_program.starting import predicted
from lab.any_program.subject import (
    Model,
    NotNow,
    Subject,
    as_tensor,
    dtype_of,
    name_of,
    need,
    random_values,
)
from mp_optim import OptimizerParamScheduler
from mp_optim.kernels.native_library import set_host_threads


class Program(RuleBasedStateMachine):
    """A program over the public API. A subclass has the operations.

    Attributes:
        without: operations that are left out, or ``operation:kind``.
        counts: operations carried out by all programs, and programs.
        kept_state: tensors of state that the program has kept, by subject, parameter and key.
        on_failure: called with the error and the program so far, when a program fails.
    """

    without: ClassVar[frozenset[str]] = frozenset()
    counts: ClassVar[Counter[str]] = Counter()
    on_failure: ClassVar[Callable[[Exception, list[str]], None] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.failed = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take note of a failure; warnings are not what is looked for."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            self.failed = True
            if type(self).on_failure is not None:
                type(self).on_failure(error, self.lines)
            raise

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        """Build the model and its optimizer."""
        self.counts["programs"] += 1
        self.lines.append(f"state.begin(setup={setup!r})")
        first, *rest = setup.params  # something has to be trainable
        setup = replace(setup, params=(replace(first, frozen=False), *rest))
        self.setup, self.transposed = setup, {}
        self.threads = torch.get_num_threads()
        self.serial = len(setup.params)
        self.remembered: tuple[Any, Any, Oracle] | None = None
        self.scheduler: OptimizerParamScheduler | None = None
        self.amp: GradScaler | None = None
        self.kept_state: dict[tuple[Any, str, str], Tensor] = {}
        model, slots = Model(), {}
        for index, param in enumerate(setup.params):
            name = name_of(index, param)
            slots[name] = self.new_param(model, name, param, setup.seed + index)
        self.oracle = predicted(setup, slots)
        by_hand = setup.groups or setup.rule == "foreign"
        explicit = self.oracle.groups if by_hand else None
        with self.watched():
            self.subject = Subject(setup, setup.place, model, explicit)
            self.published: Published | None = None
            self.track()

    def track(self) -> None:
        if self.setup.seed % 2:
            self.published = Published(self.subject)

    def publish(self, full: bool) -> None:
        self.leave()
        if self.published is None or self.published.subject is not self.subject:
            self.published = Published(self.subject)
        self.published.publish(full)

    def new_param(self, model: Model, name: str, param: Param, seed: int) -> Slot:
        dtype = dtype_of(param, self.setup.precision)
        values = random_values(seed, param.shape, dtype).reshape(-1)
        self.transposed[name] = param.transposed
        tensor = as_tensor(values, param.shape, dtype, param.transposed)
        model.add(name, nn.Parameter(tensor, requires_grad=not param.frozen))
        return Slot(name, param.shape, dtype, values, bound=not param.frozen)

    # -- who is meant -----------------------------------------------------------------------------

    def pick(self, index: int) -> Slot:
        slots = [slot for _, slot in self.oracle.order()]
        need(slots)
        return slots[index % len(slots)]

    def leave(self) -> None:
        if "pending" in self.without:
            need(not any(slot.touched for slot in self.oracle.slots.values()))
        self.subject.bind(self.oracle)
        self.oracle.follow()

    def only(self, kind: str) -> None:
        """Leave out a kind of an operation that the program is to be without."""
        need(kind not in self.without)

    # -- steps ------------------------------------------------------------------------------------

    def go_backward(self, seed: int, micro: int, unused: set[int], hold: bool, size: str) -> None:
        stepping.go_backward(self.subject, seed, micro, unused, hold, size)

    def take_step(self, closure: bool) -> None:
        stepping.take_step(self.subject, self.oracle, closure)

    # -- the end ----------------------------------------------------------------------------------

    def teardown(self) -> None:
        if self.failed or not self.lines:
            return
        torch.set_num_threads(self.threads)
        set_host_threads(None)
        with self.watched():
            publishes = self.published is not None and "publish_changes" not in self.without
            if self.setup.seed % 2:
                self.check_state()
            if publishes:
                self.publish(full=False)
            self.go_backward(self.setup.seed, 1, set(), False, "normal")
            self.take_step(closure=False)
            self.subject.check_model(self.oracle)
            if publishes:
                self.publish(full=False)
            self.check_state()

    def check_state(self) -> None:
        if "pending" in self.without and any(slot.touched for slot in self.oracle.slots.values()):
            return
        self.subject.bind(self.oracle)
        self.oracle.follow()
        other = zlib.crc32(self.lines[0].encode()) % len(leaving.LOOKS)
        for how in ("torch.save", leaving.LOOKS[other]):
            if f"look:{how}" not in self.without:
                with contextlib.suppress(NotNow):
                    leaving.look(self.subject, self.oracle, how)
        self.subject.check_main_params(self.oracle)
