"""A disk that transfers as late as possible, so that a missing wait gives wrong bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from mp_optim.host.direct_file import DirectFile


class _Late:
    """A future that performs its transfer at the first ``wait()``."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do

    def wait(self) -> None:
        do, self._do = self._do, None
        if do is not None:
            do()


@contextmanager
def slow_disk() -> Iterator[None]:
    read, write = DirectFile.read_into, DirectFile.write_from

    def late_read(file: DirectFile, memory: Tensor, offset: int) -> _Late:
        memory.fill_(0xFF)
        return _Late(lambda: read(file, memory, offset).wait())

    def late_write(file: DirectFile, memory: Tensor, offset: int) -> _Late:
        return _Late(lambda: write(file, memory, offset).wait())

    with patch.multiple(DirectFile, read_into=late_read, write_from=late_write):
        yield
