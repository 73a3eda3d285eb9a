"""Tries faults: a copy of the checkout, one file of it changed at a time, and a fork for each that
runs pytest.

Forks are made of a process that has imported torch and pytest and nothing of the package, so that a
fault costs the import of the package and its tests only. Ranks and other programs that tests start
read the changed file, too.
"""

from __future__ import annotations

import compileall
import gc
import importlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from lab.mutation.operators import Mutant
from lab.mutation.sampling import Chosen

__all__ = ["WARM", "Outcome", "Workshop"]

WARM = (
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.run",
    "triton",
    "tyro",
    "rich.table",
)
"""What is imported before the forks are made."""
_SLACK = 6.0
"""How much longer than without the fault the tests may take."""


@dataclass(frozen=True)
class Outcome:
    """What came of a fault.

    Attributes:
        status: killed, survived, timeout (a test did not end), or uncovered (no test runs the
            line).
        killer: the first test that failed, and how.
        seconds: it took.
    """

    status: str
    killer: str
    seconds: float


class Workshop:
    """A copy of a checkout in which one fault after the other is tried.

    Args:
        root: the checkout. folder: where the copy is made.
        patience: seconds that tests are given beyond six times what they take without a fault.
        warm: modules to import before the forks are made.
    """

    def __init__(
        self, root: Path, folder: Path, patience: float, warm: Sequence[str] = WARM
    ) -> None:
        self._patience = patience
        self._tree, self._log = folder / "tree", folder / "log"
        shutil.rmtree(self._tree, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        native = [str(path.relative_to(root)) for path in (root / "mp_optim").rglob("*.so")]
        for name in [*listed, *native]:
            if (root / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self._tree / name)
        compileall.compile_dir(self._tree, quiet=2)
        self._warm_up(warm)

    def _warm_up(self, warm: Sequence[str]) -> None:
        """Import what every test needs, once. Nothing of the package may come with it."""
        sys.dont_write_bytecode = True
        os.environ |= {
            "PYTHONPATH": str(self._tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        }
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.path.insert(0, str(self._tree))
        for name in warm:
            with suppress(ImportError):
                importlib.import_module(name)
            if name == "torch" and not sys.modules["torch"].cuda.is_available():
                os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
        self._load_plugins()
        loaded = [name for name in sys.modules if name.partition(".")[0] == "mp_optim"]
        if loaded:
            raise RuntimeError(f"{loaded[0]} is imported before its fault is made")

    def _load_plugins(self) -> None:
        """Have pytest import its plugins, which take as long as a small test; nothing is run."""
        import pytest

        before = Path.cwd()
        os.chdir(self._tree.parent)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            pytest.main(["--version", "-p", "no:cacheprovider"])
        os.chdir(before)

    def attempt(self, mutant: Mutant, chosen: Chosen) -> Outcome:
        """Run the chosen tests with a fault."""
        if not chosen.arguments:
            return Outcome("uncovered", "", 0.0)
        path = self._tree / mutant.path
        source, started = path.read_text(), time.monotonic()
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.unlink(missing_ok=True)  # by time and size it might pass for the changed file's
        try:
            path.write_text(mutant.applied(source))
            code = self._run(chosen)
        finally:
            path.write_text(source)
        took = time.monotonic() - started
        if code is None:
            return Outcome("timeout", self._last_test(), took)
        return Outcome("killed" if code else "survived", self._failure() if code else "", took)

    def _run(self, chosen: Chosen) -> int | None:
        """Pytest's exit status, or None if it did not end in time."""
        limit = self._patience + _SLACK * chosen.seconds
        gc.freeze()  # who covers what may take gigabytes, which a fork would copy to look at them
        child = os.fork()
        if not child:
            self._be_pytest(chosen)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                with suppress(ProcessLookupError):  # ranks that were left over
                    os.killpg(child, signal.SIGKILL)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def _be_pytest(self, chosen: Chosen) -> None:
        code = 1
        try:
            os.setsid()
            os.chdir(self._tree)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            _forget_own_modules()
            import pytest

            code = int(
                pytest.main(
                    [
                        "-x",
                        "-v",
                        "--tb=line",
                        "-p",
                        "no:cacheprovider",
                        "-p",
                        "no:randomly",
                        "-m",
                        "not slow and not gpu",
                        "-o",
                        "timeout=0",
                        *chosen.arguments,
                    ]
                )
            )
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _failure(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return named[-1][:300] if named else f"no test was run: {' '.join(lines[-3:])[:300]}"

    def _last_test(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return next((line[:300] for line in reversed(lines) if "::" in line), "")


def _forget_own_modules() -> None:
    """Have tests of the copy import ``lab`` from the copy: the checkout's starts processes that
    import the package without the fault."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]
