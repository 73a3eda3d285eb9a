"""Whether a process of the job still exists, asked of its kernel: it needs no thread and no message
while all is well.

Each process listens on a port of its own and never answers. The kernel completes the connection for
as long as the process exists, also while it computes, holds the interpreter's lock or is stopped,
and refuses it from then on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

_BACKLOG = 4096
"""Connections that are never accepted: as many ranks can ask."""
_SECONDS = 2.0
"""For an answer from another machine."""


@dataclass(frozen=True)
class Address:
    """Where a process listens. ``machine`` tells whether a loopback address means anything."""

    host: str
    port: int
    machine: str

    def __str__(self) -> str:
        return f"{self.port} {self.machine} {self.host}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The inverse of ``str``."""
        port, machine, host = text.split(" ", 2)
        return cls(host, int(port), machine)


_listening: list[tuple[socket.socket, Address, int]] = []
"""This process's socket, its address, and the process that opened it."""


def own_address(towards: tuple[str, int] | None) -> Address | None:
    """Where this process listens, from now on; None if it may not.

    Args:
        towards: host and port through which the job's processes find each other: the way there
            shows under which address they know this machine.
    """
    for _, address, pid in _listening:
        if pid == os.getpid():
            return address
    host = _local_host(towards)
    try:
        sock = socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
        )
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError:
        return None
    address = Address(host, sock.getsockname()[1], _machine())
    _listening[:] = [(sock, address, os.getpid())]
    return address


def _close_in_child() -> None:
    """A forked child would keep the port open after its parent's end."""
    for sock, *_ in _listening:
        sock.close()
    _listening.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _local_host(towards: tuple[str, int] | None) -> str:
    if towards is None:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(
            *towards, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket only chooses a route
            host: str = probe.getsockname()[0]
            return host
    return "127.0.0.1"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = platform.node().replace(" ", "-")
    return f"{name}/{boot.read_text().strip()}" if boot.exists() else name


def exists(address: Address) -> bool | None:
    """Whether the process is there; None if that cannot be told from here."""
    if address.machine != _machine() and address.host.startswith(("127.", "::1")):
        return None
    try:
        with socket.create_connection((address.host, address.port), timeout=_SECONDS):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
