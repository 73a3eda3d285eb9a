"""Count the kernels that torch would launch: operations that are neither views nor allocations."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NOT_LAUNCHED = {
    "alias",
    "detach",
    "empty",
    "expand",
    "lift_fresh",
    "select",
    "slice",
    "unbind",
    "unsqueeze",
    "view",
}


class KernelLaunches(TorchDispatchMode):
    """A context; ``names`` lists the operations that ran in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NOT_LAUNCHED:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
