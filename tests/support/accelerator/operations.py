"""Queue torch operations on device memory, and run those on host memory at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from support.accelerator.memory import POISON, Deed, Region, Span
from support.accelerator.simulation import Simulation
from support.accelerator.streams import Stream

aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._foreach_copy_.default)
_ONLY_SHAPES = ("set_", "resize_", "detach_", "as_strided_", "t_", "squeeze_", "unsqueeze_")
_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


class Operations(TorchDispatchMode):
    """The dispatch mode of one thread."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {**(kwargs or {})}
        if FakeTensor in types:
            return func(*args, **kwargs)
        if not set(types) <= {Tensor, torch.nn.Parameter}:
            return NotImplemented  # Decompose a subclass: the simulation sees plain tensors only.
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if _shows_only(func):
            return func(*args, **kwargs)
        with self._simulation.lock:
            return _Call(self._simulation, func, args, kwargs).make()


def _shows_only(func: Any) -> bool:
    """True if the operation reads and writes no element."""
    infos = [argument.alias_info for argument in func._schema.arguments]
    if any(info is not None and not info.is_write for info in infos):
        return True
    return func._schema.name.removeprefix("aten::") in _ONLY_SHAPES


class _Call:
    """One call of a torch operation."""

    def __init__(
        self, simulation: Simulation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.simulation, self.memory = simulation, simulation.memory
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = str(func)
        self.read: list[Tensor] = []
        self.written: list[Tensor] = []
        self._sort_arguments()

    def _sort_arguments(self) -> None:
        names = [argument.name for argument in self.func._schema.arguments]
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        for argument in self.func._schema.arguments:
            info = argument.alias_info
            tensors = _tensors(given.get(argument.name))
            (self.read if info is None else self.written).extend(tensors)

    @property
    def mutates(self) -> bool:
        return self.func._schema.is_mutable

    def make(self) -> Any:
        device = self._device()
        if device is None:
            return self._on_host()
        stream = self.simulation.thread.streams[device]
        if self.func in _COPIES:
            return self._copy(stream)
        for region in self._regions(self.written):
            self._let_in(region, device, stream)
        self.read = [tensor for tensor in self.read if self._is_let_in(tensor, device, stream)]
        tells = [r for r in self.func._schema.returns if "Tensor" not in str(r.type)]
        if tells or self._asks_for_values() or not self.func._schema.name.startswith("aten::"):
            return self._at_once(stream)
        return self._change(stream) if self.mutates else self._compute(stream)

    def _asks_for_values(self) -> bool:
        if self.func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
            return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(self.args[1]))
        return torch.Tag.dynamic_output_shape in self.func.tags

    def _device(self) -> int | None:
        regions = self._regions([*self.read, *self.written])
        return next((r.device for r in regions if r.device is not None), None)

    def _regions(self, tensors: Sequence[Tensor]) -> list[Region]:
        regions = (self.memory.of(tensor) for tensor in tensors)
        return [region for region in regions if region is not None]

    def _deed(self, made: Sequence[Tensor] = ()) -> Deed:
        written = self._spans([*self.written, *made], writes=True)
        return Deed(self.name, [*self._spans(self.read, writes=False), *written])

    def _spans(self, tensors: Sequence[Tensor], writes: bool) -> list[tuple[Span, bool]]:
        spans = (self.memory.span(tensor) for tensor in tensors)
        return [(span, writes) for span in spans if span is not None]

    def _on_host(self) -> Any:
        self.simulation.do(self._deed())
        results = self.func(*self.args, **self.kwargs)
        made = [] if self.mutates else self._spans(_tensors(results), writes=True)
        if self.func._schema.name.removeprefix("aten::") not in _EMPTY:
            self.simulation.do(Deed(self.name, made))
        return results

    def _is_let_in(self, tensor: Tensor, device: int, stream: Stream) -> bool:
        region = self.memory.of(tensor)
        if region is None or (region.device is None and region.size <= 8):
            return False
        self._let_in(region, device, stream)
        return True

    def _let_in(self, region: Region, device: int, stream: Stream) -> None:
        if region.device is None:
            if region.is_page_locked:
                self.simulation.report(f"{self.name} on {stream.name} is given host memory")
            region.device, region.home = device, stream

    def _copy(self, stream: Stream) -> Any:
        regions = self._regions([*self.read, *self.written])
        crosses = any(region.device is None for region in regions)
        for tensor in [*self.read, *self.written]:
            region = self.memory.of(tensor)
            if region is not None and tensor.untyped_storage().data_ptr() == region.base:
                region.guarded.add(stream.name)
        result = self._change(stream, is_download=self._is_download())
        if not crosses:
            return result
        if not self._is_asynchronous():
            self.simulation.finish(stream)
            return result
        self.simulation.check_device(stream.device, "a copy that nothing waits for")
        for region in regions:
            region.is_page_locked |= region.device is None
        return result

    def _is_download(self) -> bool:
        to_host = all(region.device is None for region in self._regions(self.written))
        return to_host and self._is_asynchronous()

    def _is_asynchronous(self) -> bool:
        return bool(self.kwargs.get("non_blocking", self.args[2] if len(self.args) > 2 else False))

    def _change(self, stream: Stream, is_download: bool = False) -> Any:
        """Queue an operation that writes to its arguments."""
        deed = replace(self._deed(), is_download=is_download)
        self.simulation.queue(stream, self._on_twins(), deed)
        # Foreach kernels raise autograd's version counter, and this kernel runs later.
        if "foreach" in self.name:
            torch.autograd.graph.increment_version(self.written)
        return _written_arguments(self.func._schema, self.args, self.kwargs)

    def _compute(self, stream: Stream) -> Any:
        """Queue an operation that returns new tensors."""
        known = [region.base for region in self._regions(self.read)]
        try:
            results = self.func(*self.args, **self.kwargs)
        except Exception:  # The operation may fail on contents that are not computed yet.
            return self._at_once(stream)
        made = _tensors(results)
        real = [t for t in made if t.numel() and not t.is_meta]
        new = [t for t in real if t.untyped_storage().data_ptr() not in known]
        if made and not new:
            return results  # A view of the same memory.
        twins = [self._new_twin(tensor, stream) for tensor in made]
        if self.func._schema.name.removeprefix("aten::") in _EMPTY:
            return results
        run = self._on_twins()

        def fill() -> None:
            for twin, value in zip(twins, _tensors(run()), strict=True):
                if twin is not None:
                    twin.copy_(value)

        self.simulation.queue(stream, fill, self._deed(new))
        return results

    def _new_twin(self, tensor: Tensor, stream: Stream) -> Tensor | None:
        region = self.memory.of(tensor)
        if region is None:
            return None
        region.device, region.home = stream.device, stream
        region.bytes().fill_(POISON)
        return region.alias(tensor)

    def _at_once(self, stream: Stream) -> Any:
        self.simulation.queue(stream, lambda: None, self._deed())
        self.simulation.finish(stream)
        results = self.func(*self.args, **self.kwargs)
        for tensor in _tensors(results):
            region = self.memory.of(tensor)
            if region is not None and region.device is None and not self.mutates:
                region.device, region.home = stream.device, stream
        return results

    def _on_twins(self) -> Callable[[], Any]:
        func = self.func
        args, kwargs = tree_map(self._twin, (self.args, self.kwargs))
        return lambda: func(*args, **kwargs)

    def _twin(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        region = self.memory.of(value)
        if region is None:
            return value.detach()
        if region.device is None and self.func not in _COPIES:
            return value.detach().clone()  # A host number is copied when the kernel is launched.
        return region.alias(value)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _written_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not schema.returns:
        return None
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [
        given[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[0] if len(schema.returns) == 1 else tuple(written)
