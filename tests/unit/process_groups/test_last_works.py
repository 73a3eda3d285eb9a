"""A process that ends waits until gloo's threads have finished their last collective."""

import ctypes
import hashlib
import threading
import time

import pytest
import torch
import torch.distributed as dist

from mp_optim.process_groups import last_collectives
from support.launch import run_forked_program

_SET_NAME = 15
"""The option PR_SET_NAME of prctl(2)."""

pytestmark = pytest.mark.skipif(
    not last_collectives._TASKS.exists(), reason="this system does not list its threads"
)


def _busy_like_gloo(begun: threading.Event, done: threading.Event) -> None:
    ctypes.CDLL(None).prctl(_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
    data = bytes(200_000_000)
    begun.set()
    hashlib.sha256(data)
    done.set()


def test_exit_waits_for_a_gloo_thread_that_is_running():
    begun, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=_busy_like_gloo, args=(begun, done), daemon=True)
    thread.start()
    begun.wait()
    last_collectives.finish()
    assert done.is_set()
    thread.join()


def test_exit_finds_gloo_threads_by_the_name_that_torch_sets():
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1)
    group.allreduce([torch.ones(1)]).wait()
    assert list(last_collectives._states())


def test_exit_stops_waiting_for_a_hanging_gloo_thread_after_a_time_limit(monkeypatch):
    monkeypatch.setattr(last_collectives, "_states", lambda: "R")
    monkeypatch.setattr(last_collectives, "_EXIT_PATIENCE", 0.05)
    begun = time.monotonic()
    last_collectives.finish()
    assert 0.05 <= time.monotonic() - begun < 2.0


def test_exit_handler_runs_when_an_optimizer_has_process_groups():
    printed = run_forked_program("-c", _PROGRAM)
    assert printed.splitlines()[-1] == "finished"


_PROGRAM = """
import torch, torch.distributed as dist
from mp_optim import OptimizerConfig, ProcessGroups, get_megatron_optimizer
from mp_optim.process_groups import last_collectives
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
last_collectives.finish = lambda: print("finished")
model = torch.nn.Linear(2, 2)
groups = ProcessGroups(grad_stats=dist.group.WORLD)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), model, process_groups=groups)
model(torch.ones(2)).sum().backward()
optimizer.step()
"""
