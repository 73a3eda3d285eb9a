"""Steps replayed from CUDA graphs equal eager ones bit for bit, whatever changes between them."""

from __future__ import annotations

import copy
import gc
import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from mp_optim import FusedLAMB, OptimizerConfig, get_megatron_optimizer
from mp_optim.precision import Float16OptimizerWithFloat16Params, MegatronOptimizer
from mp_optim.precision.graph_step import MOST_CHANGES, CudaGraph
from mp_optim.process.accelerator import accelerator_of
from support import graphs
from support.accelerator.simulation import device_at
from support.accelerator.stand_in import simulated_accelerator
from support.models import build, config_for, same_bits
from support.waiting import no_waiting

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tests marked gpu do this on the GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def small(precision: str = "bf16", **settings: Any) -> tuple[nn.Module, MegatronOptimizer]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
        precision.split("-")[0]
    ]
    values = torch.linspace(-1, 1, 300)
    model = nn.ParameterDict(
        {
            "whole": nn.Parameter(values.reshape(30, 10).to(dtype, copy=True)),
            "mtp": nn.Parameter(values[:40].to(dtype, copy=True)),
        }
    )
    model["mtp"].grad_norm_group = "mtp"
    for param in model.values():
        param.grad = torch.zeros_like(param)
    config = config_for(precision, fused_backend="triton", **settings)
    return model, get_megatron_optimizer(config, model, config_overrides={})


def test_a_graph_is_captured_on_a_stream_of_its_device(monkeypatch):
    """torch's own stream for captures is one of the device of the process's first graph."""
    captures = []
    device = device_at(1)
    with simulated_accelerator() as simulation:
        accelerator = accelerator_of(device)

        @contextmanager
        def capture(graph, stream):
            captures.append((accelerator.current(), stream.device))
            yield

        monkeypatch.setattr(accelerator, "new_graph", object)
        monkeypatch.setattr(accelerator, "capture", capture)
        simulation.thread.device = 0
        assert CudaGraph(device, accelerator).capture(lambda: 5) == 5
        # an optimizer that is collected then would wait for its copies, and the capture be lost
        assert gc.isenabled() and not CudaGraph(device, accelerator).capture(gc.isenabled)
        assert gc.isenabled()
    assert captures == 2 * [(device, device)]


def give_grads(
    model: nn.Module, optimizer: MegatronOptimizer, step: int, bad: float | None = None
) -> None:
    """New values in the same memory."""
    generator = torch.Generator().manual_seed(step)
    for param in model.values():
        values = torch.randn(param.shape, generator=generator) * 0.05 * optimizer.get_loss_scale()
        param.grad.copy_(values)
        if bad is not None:
            param.grad.view(-1)[7] = bad


LONG = {"moved": 12, "saved": 15, "loaded": 20, "added": 23, "end": 30}
SHORT = {"moved": 5, "saved": 6, "loaded": 9, "added": 99, "end": 11}


def story(precision: str, when: dict[str, int], **settings: Any) -> tuple[dict[str, Any], Any]:
    """A run in which everything changes that may: rates, weight decay, gradient memory, loaded
    state, a new group."""
    model, optimizer = small(precision, **settings)
    results, replays, saved, weights = [], 0, {}, {}
    for step in range(when["end"]):
        if step == when["moved"]:
            for param in model.values():
                param.grad = torch.zeros_like(param)
        if step == when["loaded"]:
            with torch.no_grad():
                for name, value in weights.items():
                    model[name].copy_(value)
            optimizer.load_state_dict(saved)
        if step == when["added"]:
            late = nn.Parameter(torch.ones(5, dtype=model["mtp"].dtype))
            late.grad = torch.full_like(late, 0.25)
            optimizer.add_param_group({"params": [("late", late)], "lr": 0.5})
        give_grads(model, optimizer, step, {0: math.inf, 4: math.nan, 17: math.inf}.get(step))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
            group["weight_decay"] = 0.1 if step != 9 else 0.2
        results.append(optimizer.step())
        if step == when["saved"]:
            saved = copy.deepcopy(optimizer.state_dict())
            weights = {name: param.detach().clone() for name, param in model.items()}
        replays = optimizer.metrics().get("graph_replays", 0)
    state = optimizer.state_dict(full_precision=True)["state"]
    metrics = {k: v for k, v in optimizer.metrics().items() if not k.startswith("graph")}
    return {
        "results": [tuple(result) for result in results],
        "metrics": metrics,
        "state": {f"{i}.{k}": v.clone() for i, s in state.items() for k, v in s.items()},
        "params": {name: p.detach().clone() for name, p in model.items()},
    }, (optimizer, replays)


@pytest.mark.parametrize(
    ("precision", "settings", "when"),
    [
        ("fp16", {"hysteresis": 1, "loss_scale_window": 4}, LONG),
        ("fp32", {"optimizer": "lamb"}, SHORT),
        ("bf16", {"optimizer": "stable_adamw"}, SHORT),
        ("bf16", {"caution": True, "cautious_wd": True}, SHORT),
        ("bf16-stochastic", {}, SHORT),
        ("bf16", {"optimizer": "sgd", "log_num_zeros_in_grad": True}, SHORT),
        ("bf16", {"optimizer": "lion", "clip_grad": 0.0}, SHORT),
    ],
)
def test_steps_equal_eager_ones(precision, settings, when, monkeypatch):
    graphs.allow(monkeypatch)
    eager, _ = story(precision, when, **settings)
    assert not graphs.TapeGraph.made
    found, (optimizer, replays) = story(precision, when, optimizer_cuda_graph=True, **settings)
    assert optimizer.metrics()["graph_captures"] >= 2 and replays >= when["end"] // 3
    assert "CUDA graph: replayed" in str(optimizer.describe())
    for what in ("results", "metrics"):
        assert repr(found[what]) == repr(eager[what]), what
    for what in ("state", "params"):
        assert found[what].keys() == eager[what].keys()
        for name, value in eager[what].items():
            assert same_bits(found[what][name], value), name


def test_a_replay_reads_nothing_and_says_what_it_does(monkeypatch):
    graphs.allow(monkeypatch)
    model, optimizer = small(optimizer_cuda_graph=True)
    said = []
    for step in range(5):
        give_grads(model, optimizer, step)
        if step == 4:
            with no_waiting(monkeypatch, optimizer):
                assert not optimizer.step().is_known
        else:
            optimizer.step()
        said.append(optimizer.describe().notes[0])
    assert said == [
        "CUDA graph: eager: 1 of 2 steps alike; captured 0 times, replayed 0 times",
        "CUDA graph: eager: 2 of 2 steps alike; captured 0 times, replayed 0 times",
        "CUDA graph: replayed; captured 1 times, replayed 0 times",
        "CUDA graph: replayed; captured 1 times, replayed 1 times",
        "CUDA graph: replayed; captured 1 times, replayed 2 times",
    ]


@pytest.mark.parametrize("setting", [{"caution": True}, {"weight_decay": 0.0}])
def test_a_step_by_other_kernels_is_eager_and_it_is_said(monkeypatch, setting):
    graphs.allow(monkeypatch)
    model, optimizer = small(optimizer_cuda_graph=True)
    said = []
    for step in range(7):
        if step == 4:
            for group in optimizer.param_groups:
                group.update(setting)
        give_grads(model, optimizer, step)
        optimizer.step()
        said.append(optimizer.describe().notes[0].partition(";")[0])
    assert said[3:] == [
        "CUDA graph: replayed",
        "CUDA graph: eager: what is stepped has changed",
        "CUDA graph: eager: 2 of 2 steps alike",
        "CUDA graph: replayed",
    ]


def test_gradients_that_move_every_time_are_stepped_eagerly_and_it_is_said(monkeypatch):
    graphs.allow(monkeypatch)
    model, optimizer = small(optimizer_cuda_graph=True)
    kept = []
    for step in range(MOST_CHANGES + 3):
        for param in model.values():
            kept.append(param.grad)
            param.grad = torch.zeros_like(param)
        give_grads(model, optimizer, step)
        assert optimizer.step().success
    assert not graphs.TapeGraph.made and "set_to_none=False" in str(optimizer.describe())
    assert optimizer.metrics()["steps"] == MOST_CHANGES + 3


def test_gradients_are_not_kept_by_the_optimizer(monkeypatch):
    import weakref

    graphs.allow(monkeypatch)
    model, optimizer = small(optimizer_cuda_graph=True)
    give_grads(model, optimizer, 0)
    optimizer.step()
    gone = weakref.ref(model["whole"].grad)
    model["whole"].grad = None
    assert gone() is None


def test_replaced_parameters_and_missing_gradients_are_seen(monkeypatch):
    graphs.allow(monkeypatch)

    def run(**settings: Any) -> list[torch.Tensor]:
        model, optimizer = small(**settings)
        for step in range(12):
            if step == 6:
                new = nn.Parameter(model["whole"].detach().clone())
                new.grad = model["whole"].grad
                for group in optimizer.param_groups:
                    group["params"] = [
                        new if param is model["whole"] else param for param in group["params"]
                    ]
                model["whole"] = new
            if step == 9:
                model["mtp"].grad = None
            for param in model.values():
                if param.grad is not None:
                    param.grad.fill_(0.01 * (step + 1))
            optimizer.step()
        return [param.detach().clone() for param in model.values()]

    assert all(map(same_bits, run(), run(optimizer_cuda_graph=True)))
    assert len(graphs.TapeGraph.made) == 6


def test_a_chain_is_captured_as_one(monkeypatch):
    graphs.allow(monkeypatch)

    def run(**settings: Any) -> list[torch.Tensor]:
        model, optimizer = build("fp16", fused_backend="triton", **settings)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for step in range(6):
            for index, param in enumerate(model.parameters()):
                param.grad.fill_(math.inf if step == 4 else 0.1 * (step + index))
            optimizer.get_loss_scale()  # says that they are scaled
            optimizer.step()
        assert len(optimizer.chained_optimizers) == 2
        return [param.detach().clone() for param in model.parameters()]

    assert all(map(same_bits, run(), run(optimizer_cuda_graph=True)))
    assert len(graphs.TapeGraph.made) == 2


def test_what_no_kernel_reads_is_stepped_eagerly_and_it_is_said(monkeypatch):
    graphs.allow(monkeypatch)
    param = nn.Parameter(torch.ones(4))
    config = config_for("fp32", fused_backend="triton", optimizer_cuda_graph=True)
    optimizer = get_megatron_optimizer(config, nn.ParameterDict({"w": param}))
    param.main_grad = torch.ones(4, dtype=torch.float64)
    for _ in range(5):
        assert optimizer.step().success
    assert float(optimizer.state[param]["step"]) == 5.0
    assert "no kernel for gradients of torch.float64" in str(optimizer.describe())


def test_what_is_copied_in_each_step_is_stepped_eagerly_and_it_is_said(monkeypatch):
    graphs.allow(monkeypatch)
    param = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16).t())
    param.grad = torch.ones_like(param)
    config = config_for("bf16", fused_backend="triton", optimizer_cuda_graph=True)
    optimizer = get_megatron_optimizer(config, nn.ParameterDict({"w": param}))
    for _ in range(4):
        assert optimizer.step().success
    assert not graphs.TapeGraph.made and "not contiguous" in str(optimizer.describe())


def test_a_step_that_cannot_be_captured_raises_and_leaves_everything_as_it_was(monkeypatch):
    graphs.allow(monkeypatch)
    model, optimizer = small(optimizer_cuda_graph=True)
    for step in range(2):
        give_grads(model, optimizer, step)
        optimizer.step()
    before = {name: param.detach().clone() for name, param in model.items()}
    capture, failing = graphs.TapeGraph.capture, [False, True]

    def broken(self: Any, work: Any) -> Any:
        result = capture(self, work)
        if failing.pop(0):
            raise RuntimeError("operation not permitted when stream is capturing")
        return result

    monkeypatch.setattr(graphs.TapeGraph, "capture", broken)
    with pytest.raises(RuntimeError, match="capturing"):
        optimizer.step()
    assert all(same_bits(param.detach(), before[name]) for name, param in model.items())
    assert [float(state["step"]) for state in optimizer.state_dict()["state"].values()] == [
        2.0,
        2.0,
    ]


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fused_backend": "apex"}, "fused_backend='apex' cannot be captured"),
        ({"fused_backend": "torch"}, "fused_backend='torch' cannot be captured"),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
            "a host part cannot be captured",
        ),
        ({"timers": lambda name, log_level: None}, "set timers=None"),
    ],
)
def test_configs_that_contradict_it(settings, said):
    with pytest.raises(ValueError, match="optimizer_cuda_graph=True") as error:
        OptimizerConfig(lr=0.1, optimizer_cuda_graph=True, **settings)
    assert said in str(error.value)


def test_without_a_gpu_and_where_the_host_has_to_know_it_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match="optimizer_cuda_graph=True: the model's parameters are on cpu"
    ):
        small(optimizer_cuda_graph=True)
    graphs.allow(monkeypatch)
    with pytest.raises(
        ValueError, match="optimizer_cuda_graph=True: the step needs the verdict on the host"
    ):
        build("bf16", optimizer_cuda_graph=True)
    params = [nn.Parameter(torch.ones(4))]
    config = OptimizerConfig(lr=0.1, fused_backend="triton", optimizer_cuda_graph=True)
    with pytest.raises(ValueError, match="max_grad_norm"):
        Float16OptimizerWithFloat16Params(
            FusedLAMB(params, max_grad_norm=1.0, backend="triton"), config
        )
