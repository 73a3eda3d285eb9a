"""A forked child changes no state of its parent on disk and does not hang."""

import os
import signal
import sys

import pytest
import torch
from torch import nn

import mp_optim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="os.fork of Linux")


def build(folder, place, mode="sync"):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 100).bfloat16()) for _ in range(3)]
    settings = {"offload": 1.0, "offload_place": place}
    if folder is not None:
        settings |= {"optimizer_state_path": folder, "stream_window_bytes": "4MiB"}
        settings["offload_mode"] = mode
    named = [(f"p{i}", param) for i, param in enumerate(params)]
    return params, mp_optim.AdamW(named, lr=0.01, **settings)


def step(params, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).bfloat16()
    optimizer.step()


def error_in_child(work):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        message = "nothing"
        try:
            work()
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writer, message.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        message = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "ended by its alarm"
    return message


def steps(params, optimizer, held, saved):
    step(params, optimizer, 50)


def loads(params, optimizer, held, saved):
    optimizer.load_state_dict(saved)


def scales(params, optimizer, held, saved):
    optimizer.scale_rows_({"p0": torch.full((64,), 0.5)})


def reads(params, optimizer, held, saved):
    optimizer.state_dict()


def saves(params, optimizer, held, saved):
    list(optimizer.stack.named_main_params())


def writes_what_it_holds(params, optimizer, held, saved):
    for tensor in held:
        tensor.fill_(7.0)


@pytest.mark.parametrize(("place", "before"), [("host", 1), ("streamed", 0)])
@pytest.mark.parametrize("work", [steps, loads, scales, reads, saves, writes_what_it_holds])
def test_disk_offload_refuses_calls_in_a_forked_child_and_keeps_parent_state(
    tmp_path, place, before, work
):
    expected, alone = build(None, "host")
    params, optimizer = build(str(tmp_path), place)
    alone.stack.init_state()
    optimizer.stack.init_state()
    for number in range(before):
        step(expected, alone, number)
        step(params, optimizer, number)
    held = [main for _, main in optimizer.stack.named_main_params()]
    held += [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    saved = alone.state_dict()
    message = error_in_child(lambda: work(params, optimizer, held, saved))
    if work is writes_what_it_holds:
        assert message == "nothing"
    else:
        assert "optimizer_state_path" in message and "forked" in message
    for number in range(before, 3):
        step(expected, alone, number)
        step(params, optimizer, number)
    assert all(map(torch.equal, params, expected))


def backward(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = None
        torch.autograd.backward(param, torch.randn(param.shape, generator=generator).bfloat16())


@pytest.mark.parametrize("work", ["step", "discard_backward_work", "zero_grad"])
@pytest.mark.parametrize(("place", "mode"), [("host", "overlap"), ("streamed", "overlap")])
def test_disk_offload_trains_equally_when_forked_between_backward_and_step(
    tmp_path, place, mode, work
):
    expected, alone = build(None, "host")
    params, optimizer = build(str(tmp_path), place, mode)
    for number in range(4):
        for each in (expected, params):
            backward(each, number)
        if number > 1:
            in_child = getattr(optimizer if work == "zero_grad" else optimizer.stack, work)
            message = error_in_child(in_child)
            assert work != "step" or ("optimizer_state_path" in message and "forked" in message)
        alone.step()
        optimizer.step()
    assert all(map(torch.equal, params, expected))
