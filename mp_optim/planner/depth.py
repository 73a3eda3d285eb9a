"""The memory of a deep model from two shallow ones: its blocks are alike, so each adds to a step
what one more adds to few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from mp_optim.planner.activations import Moment, Timeline

FEW = 2
"""Periods that are traced: a first and a last, between which one more is put then."""


@dataclass(frozen=True)
class Stack:
    """Blocks that a model runs one after the other, and how they repeat.

    Attributes:
        parent, name: where the list of blocks is.
        blocks: all of them.
        head: blocks at the beginning that are unlike the others.
        period: each later block is like the one so many further on.
    """

    parent: nn.Module
    name: str
    blocks: nn.ModuleList | nn.Sequential
    head: int
    period: int

    @property
    def few(self) -> int:
        """Blocks of the shallow model: less by whole periods."""
        least = self.head + FEW * self.period
        return least + (len(self.blocks) - least) % self.period

    @property
    def spared(self) -> int:
        """Blocks that need not be traced."""
        return len(self.blocks) - 2 * self.few - self.period

    @contextmanager
    def shortened(self, count: int) -> Iterator[None]:
        """While it is open, the model has its first ``count`` blocks alone."""
        self.parent._modules[self.name] = self.blocks[:count]
        try:
            yield
        finally:
            self.parent._modules[self.name] = self.blocks


def stack_of(model: nn.Module) -> Stack | None:
    """The list of blocks of which most are spared, or None if there is none."""
    found = [
        _repeating(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child)
    ]
    most = max(found, key=lambda stack: stack.spared, default=None)
    return most if most is not None and most.spared > 0 else None


def _repeating(parent: nn.Module, name: str, blocks: nn.ModuleList | nn.Sequential) -> Stack:
    kinds = [_kind(block) for block in blocks]
    repeats = [(_head(kinds, period), period) for period in range(1, len(kinds) + 1)]
    return Stack(parent, name, blocks, *min(repeats, key=lambda pair: pair[0] + FEW * pair[1]))


def _head(kinds: Sequence[Hashable], period: int) -> int:
    unlike = [at for at in range(len(kinds) - period) if kinds[at] != kinds[at + period]]
    return unlike[-1] + 1 if unlike else 0


_POSITION = ("layer_idx", "layer_id", "layer_number")


def _kind(block: nn.Module) -> Hashable:
    """All of a block that its memory could depend on: modules with their settings, and tensors."""
    modules = [(name, type(module), _settings(module)) for name, module in block.named_modules()]
    tensors = [
        (name, value.shape, value.dtype, value.requires_grad)
        for name, value in (*block.named_parameters(), *block.named_buffers())
    ]
    return tuple(modules), tuple(tensors)


def _settings(module: nn.Module) -> Hashable:
    plain = (str, int, float, bool, type(None))
    named = [item for item in vars(module).items() if item[0] not in _POSITION]
    return tuple(item for item in named if isinstance(item[1], plain))


def trace_repeating(model: nn.Module, trace: Callable[[], Timeline]) -> Timeline:
    """What ``trace`` returns of the whole model, from two traces of it with few of its blocks.

    The whole model is traced if its blocks are not alike, or if one more is not simply more of the
    same (a tensor over all blocks, such as the loss of all routers, is not).
    """
    stack = stack_of(model)
    if stack is None:
        return trace()
    with stack.shortened(stack.few):
        shallow = trace()
    with stack.shortened(stack.few + stack.period):
        deeper = trace()
    times = (len(stack.blocks) - stack.few) // stack.period
    return extended(shallow, deeper, times) or trace()


def extended(shallow: Timeline, deeper: Timeline, times: int) -> Timeline | None:
    """The timeline with ``times`` periods more than the shallow one has.

    Args:
        deeper: with one period more.

    Returns:
        None if the deeper one is not the shallow one with something put in once in forward and
        once in backward.
    """
    moments: list[Moment] = []
    at = (0, 0, 0)
    for phase in ("forward", "backward"):
        changes = _repeated(_changes(shallow, phase), _changes(deeper, phase), times)
        if changes is None:
            return None
        for change in changes:
            at = (at[0] + change[0], at[1] + change[1], at[2] + change[2])
            moments.append(Moment(phase, *at))
    few, more = ((each.saved, each.buffers, each.grads) for each in (shallow, deeper))
    sums = (one + times * (other - one) for one, other in zip(few, more, strict=True))
    return Timeline(moments, *sums)


Change = tuple[int, int, int]


def _changes(timeline: Timeline, phase: str) -> list[Change]:
    """Of activations, logits and gradients, from moment to moment of a phase."""
    changes = []
    before = Moment("forward", 0, 0, 0)
    for now in timeline.moments:
        if now.phase == phase:
            activations = now.activations - before.activations
            changes.append((activations, now.logits - before.logits, now.grads - before.grads))
        before = now
    return changes


def _repeated(few: list[Change], more: list[Change], times: int) -> list[Change] | None:
    size = len(more) - len(few)
    pairs = zip(few, more, strict=False)
    begin = next((at for at, (one, other) in enumerate(pairs) if one != other), len(few))
    if size < 0 or few[begin:] != more[begin + size :]:
        return None
    return few[:begin] + times * more[begin : begin + size] + few[begin:]
