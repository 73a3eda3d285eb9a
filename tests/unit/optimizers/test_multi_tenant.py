"""``MultiTenantOptimizer`` gives each tenant the bits of an optimizer alone. A failure, an offload
or the removal of a tenant changes no other tenant."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import mp_optim
from mp_optim import MultiTenantOptimizer, TenantError
from mp_optim.kernels.native import NativeBackend
from mp_optim.kernels.native_library import native_library
from mp_optim.mixed_precision import step
from support.models import same_bits
from support.one_rank import one_rank

Params = list[nn.Parameter]
NAN, SCALE = float("nan"), 1024.0


def lora(rng: random.Random, dtype: torch.dtype = torch.bfloat16) -> Params:
    rank, width = rng.choice([1, 2, 4]), rng.choice([3, 8, 40])
    shapes = [(rank, width), (width, rank)] * rng.choice([1, 2])
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give_grads(params: Params, factor: float = 1.0) -> None:
    for param in params:
        param.grad = (torch.randn(param.shape) * factor).to(param.dtype)


def adapters(**settings: Any) -> tuple[MultiTenantOptimizer, dict[str, Params]]:
    """Return an optimizer of three stepped tenants, and their parameters."""
    rng = random.Random(0)
    optimizer = MultiTenantOptimizer(lr=1e-2, **settings)
    params = {name: lora(rng) for name in "abc"}
    for name, some in params.items():
        optimizer.add_tenant(name, some)
        give_grads(some)
    optimizer.step()
    return optimizer, params


def bits(optimizer: Any, params: Params) -> list[Tensor]:
    saved = optimizer.stack.state_dict()["state"]
    state = [value for index in saved for _, value in sorted(saved[index].items())]
    return [torch.as_tensor(value).clone() for value in [*params, *state]]


# -- bits -----------------------------------------------------------------------------------------


class Pair:
    """A tenant, and an optimizer alone on copies of its parameters."""

    def __init__(self, kind: Any, rng: random.Random) -> None:
        self.params = lora(rng, rng.choice([torch.bfloat16, torch.float32]))
        self.settings: dict[str, Any] = {
            "lr": rng.choice([1e-3, 3e-2]),
            "betas": (rng.choice([0.8, 0.9]), rng.choice([0.95, 0.999])),
            "weight_decay": rng.choice([0.0, 0.1]),
            "max_grad_norm": rng.choice([None, 0.5]),
            "state": rng.choice(["fp32", "bf16", "8bit"]),
            "main_params": rng.choice(["fp32", "remainder16"]),
        }
        self.scale = rng.choice([1.0, SCALE])
        self.own = [nn.Parameter(param.detach().clone()) for param in self.params]
        self.alone = kind(self.own, **self.settings)
        self.saved: list[tuple[Any, Any, list[Tensor]]] = []
        self.is_offloaded = False

    def prepare(self, factor: float) -> None:
        give_grads(self.params, factor * self.scale)
        for param, own in zip(self.params, self.own, strict=True):
            assert param.grad is not None
            own.grad = param.grad.clone()

    def step_alone(self) -> None:
        self.alone.grad_scale = torch.tensor([self.scale])  # as torch's GradScaler sets it
        self.alone.step()

    def write(self) -> None:
        for params in (self.params, self.own):
            params[0].data[0] = 0.25

    def has_same_bits(self, optimizer: MultiTenantOptimizer, name: str) -> bool:
        one, other = bits(optimizer[name], self.params), bits(self.alone, self.own)
        return len(one) == len(other) and all(map(same_bits, one, other))


class Server:
    """Random calls for random tenants."""

    def __init__(self, kind: Any, folder: Path) -> None:
        self.rng, self.folder = random.Random(kind.__name__), folder
        self.kind, self.optimizer = kind, MultiTenantOptimizer(kind)
        self.pairs: dict[str, Pair] = {}
        self.joined = 0

    def pick(self, *, is_offloaded: bool = False) -> str | None:
        fitting = [name for name, pair in self.pairs.items() if pair.is_offloaded is is_offloaded]
        return self.rng.choice(fitting) if fitting else None

    def join(self) -> None:
        name, pair = f"adapter {self.joined}", Pair(self.kind, self.rng)
        scaler = mp_optim.ConstantGradScaler(SCALE) if pair.scale == SCALE else None
        self.optimizer.add_tenant(name, pair.params, grad_scaler=scaler, **pair.settings)
        self.pairs[name], self.joined = pair, self.joined + 1

    def step(self) -> None:
        loaded = [name for name, pair in self.pairs.items() if not pair.is_offloaded]
        chosen = self.rng.sample(loaded, self.rng.randint(0, min(5, len(loaded))))
        failing = [name for name in chosen if self.rng.random() < 0.05]
        rates = {name: self.optimizer[name].param_groups[0]["lr"] for name in failing}
        for name in chosen:
            self.pairs[name].prepare(NAN if self.rng.random() < 0.1 else 1.0)
        for name in failing:
            self.optimizer[name].param_groups[0]["lr"] = -1.0
        try:
            results = self.optimizer.step(chosen)
            assert not failing
        except TenantError as error:
            assert list(error.errors) == failing
            results = error.results
        for name, rate in rates.items():
            self.optimizer[name].param_groups[0]["lr"] = rate
        for name in chosen:
            if name not in failing:
                self.pairs[name].step_alone()
                assert results[name] == self.pairs[name].alone.last_step

    def schedule(self) -> None:
        if name := self.pick():
            rate = self.rng.choice([1e-4, 1e-2])
            for optimizer in (self.optimizer[name], self.pairs[name].alone):
                optimizer.param_groups[0]["lr"] = rate

    def save(self) -> None:
        if name := self.pick():
            pair = self.pairs[name]
            weights = [param.detach().clone() for param in pair.params]
            states = self.optimizer.save_tenant(name), pair.alone.stack.state_dict()
            pair.saved.append((*copy.deepcopy(states), weights))

    def load(self) -> None:
        if (name := self.pick()) and self.pairs[name].saved:
            pair = self.pairs[name]
            state, state_alone, weights = self.rng.choice(pair.saved)
            for params in (pair.params, pair.own):
                for param, weight in zip(params, weights, strict=True):
                    param.data.copy_(weight)
            self.optimizer.load_tenant(name, state)
            pair.alone.load_state_dict(state_alone)

    def offload(self) -> None:
        if name := self.pick():
            path = self.folder / name if self.rng.random() < 0.5 else None
            self.optimizer.offload_tenant(name, path)
            self.pairs[name].is_offloaded = True
            if self.rng.random() < 0.5:
                self.pairs[name].write()

    def restore(self) -> None:
        if name := self.pick(is_offloaded=True):
            self.optimizer.restore_tenant(name)
            self.pairs[name].is_offloaded = False
            assert self.pairs[name].has_same_bits(self.optimizer, name)

    def leave(self) -> None:
        if name := self.pick(is_offloaded=self.rng.random() < 0.3):
            self.optimizer.remove_tenant(name)
            del self.pairs[name]


@pytest.mark.parametrize("kind", [mp_optim.AdamW, mp_optim.Lion])
def test_multi_tenant_gives_the_bits_of_one_optimizer_per_tenant_in_any_call_order(kind, tmp_path):
    torch.manual_seed(0)
    server = Server(kind, tmp_path)
    calls = [server.join, server.step, server.schedule, server.save, server.load]
    calls += [server.offload, server.restore, server.leave]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while server.joined < 100:
            server.rng.choices(calls, [4, 4, 1, 1, 1, 2, 2, 3])[0]()
            if name := server.pick():
                assert server.pairs[name].has_same_bits(server.optimizer, name)
        while server.pick(is_offloaded=True):
            server.restore()
        for name, pair in server.pairs.items():
            assert pair.has_same_bits(server.optimizer, name), name
    assert not list(tmp_path.iterdir()) and list(server.optimizer) == list(server.pairs)


def test_multi_tenant_overflow_shrinks_only_the_loss_scale_of_its_tenant():
    optimizer, params = MultiTenantOptimizer(lr=1e-2), {}
    for name in "ab":
        scaler = mp_optim.DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 100, 1)
        params[name] = [nn.Parameter(torch.ones(3, dtype=torch.float16))]
        optimizer.add_tenant(name, params[name], grad_scaler=scaler)
        give_grads(params[name], NAN if name == "a" else 1.0)
    results = optimizer.step()
    assert [results[name].success for name in "ab"] == [False, True]
    one = torch.ones(())
    assert [float(optimizer.scale_loss(name, one)) for name in "ab"] == [32.0, 64.0]
    params["b"][0].data.copy_(params["a"][0])
    optimizer.load_tenant("b", copy.deepcopy(optimizer.save_tenant("a")))
    assert float(optimizer.scale_loss("b", one)) == 32.0


def test_multi_tenant_steps_other_tenants_when_a_kernel_of_one_tenant_fails(monkeypatch):
    optimizer, params = adapters()
    saved, before = copy.deepcopy(optimizer.save_tenant("b")), [p.clone() for p in params["c"]]
    weights = [param.detach().clone() for param in params["b"]]
    for some in params.values():
        give_grads(some)
    with monkeypatch.context() as patch:
        executor = optimizer["b"].executor
        carry_out = type(executor).carry_out

        def interrupted(self: Any, launch: Any) -> None:
            carry_out(self, launch)
            if self is executor:
                raise RuntimeError("out of memory")

        patch.setattr(type(executor), "carry_out", interrupted)
        with pytest.raises(TenantError, match="tenant 'b': out of memory") as caught:
            optimizer.step()
    assert list(caught.value.results) == ["a", "c"] and list(caught.value.errors) == ["b"]
    assert not same_bits(before[0], params["c"][0])
    with pytest.raises(mp_optim.BrokenOffError, match="tenant 'b': state_dict"):
        optimizer.save_tenant("b")
    for param, weight in zip(params["b"], weights, strict=True):
        param.data.copy_(weight)
    optimizer.load_tenant("b", saved)
    give_grads(params["b"])
    assert optimizer.step("b")["b"].success


def test_multi_tenant_refuses_only_the_tenant_whose_kernel_was_interrupted(monkeypatch):
    optimizer, params = adapters()
    for some in params.values():
        give_grads(some)
    before = bits(optimizer["c"], params["c"])
    with monkeypatch.context() as patch:
        executor = type(optimizer["b"].executor)

        carry_out = executor.carry_out

        def interrupted(self: Any, launch: Any) -> None:
            carry_out(self, launch)
            if self is optimizer["b"].executor:
                raise KeyboardInterrupt

        patch.setattr(executor, "carry_out", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:  # keeps the frames of the step
            optimizer.step()
    assert all(map(same_bits, before, bits(optimizer["c"], params["c"])))
    assert optimizer.step("c")["c"].success
    assert optimizer.save_tenant("a")["state"][0]["step"] == 2
    with pytest.raises(mp_optim.BrokenOffError, match="tenant 'b'"):
        optimizer.save_tenant("b")
    del caught


@pytest.mark.skipif(native_library().handle is None, reason="needs native kernels")
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_multi_tenant_completes_other_tenants_when_a_queued_kernel_fails(error, monkeypatch):
    optimizer, params = adapters()
    expected, expected_params = adapters()
    for name in "abc":
        give_grads(params[name])
        for one, other in zip(params[name], expected_params[name], strict=True):
            other.data.copy_(one)
            other.grad = one.grad
        expected.load_tenant(name, copy.deepcopy(optimizer.save_tenant(name)))
    expected.step()
    calls: list[str] = []

    def prepared(self: Any, *given: Any, real: Any = NativeBackend.prepared) -> Any:
        kernel = real(self, *given)

        def call() -> None:
            calls.append("kernel")
            if len(calls) == 2:
                raise error
            kernel()

        return kernel and call

    observed = dict.fromkeys("abc", 0)
    last = {name: optimizer[name].last_step for name in "abc"}
    for name in "abc":

        def after_step(*_: Any, name: str = name) -> None:
            observed[name] += 1

        optimizer[name].observers.after_step.append(after_step)
    with monkeypatch.context() as patch:
        patch.setattr(NativeBackend, "prepared", prepared)
        with pytest.raises((TenantError, KeyboardInterrupt)) as caught:  # keeps the frames
            optimizer.step()
    assert len(calls) == 3
    for name in "ac":
        one, other = (
            bits(optimizer[name], params[name]),
            bits(expected[name], expected_params[name]),
        )
        assert all(map(same_bits, one, other))
    assert observed == {"a": 1, "b": 0, "c": 1}
    is_new = {name: optimizer[name].last_step is not last[name] for name in "abc"}
    assert is_new == {"a": True, "b": False, "c": True}
    with pytest.raises(mp_optim.BrokenOffError, match="tenant 'b'"):
        optimizer.save_tenant("b")
    del caught


@pytest.mark.parametrize("file", [None, "a.pt"])
def test_multi_tenant_refuses_offload_while_weights_are_averages(file, tmp_path):
    optimizer, params = adapters(ema_decay=0.9)
    refused = pytest.raises(RuntimeError, match="tenant 'a': offload_tenant: inside")
    with optimizer["a"].averaged_weights(), refused:
        optimizer.offload_tenant("a", file and tmp_path / file)
    assert not [*tmp_path.iterdir()]
    give_grads(params["a"])
    assert optimizer.step("a")["a"].success
    optimizer.offload_tenant("a")
    with pytest.raises(RuntimeError, match="is offloaded"):
        optimizer["a"].step()


def test_multi_tenant_runs_hooks_of_a_tenant_before_its_gradients_are_measured():
    optimizer, params = adapters()
    hook = optimizer["a"].register_step_pre_hook(lambda *_: give_grads(params["a"], NAN))
    for some in params.values():
        give_grads(some)
    results = optimizer.step()
    hook.remove()
    assert {name: result.success for name, result in results.items()} == {
        "a": False,
        "b": True,
        "c": True,
    }


@pytest.mark.parametrize("after", ["nothing", "a background save"])
def test_multi_tenant_reads_gradients_of_all_tenants_in_one_pass(after, tmp_path, monkeypatch):
    optimizer, params = adapters()
    for some in params.values():
        give_grads(some)
    if after == "a background save":  # It registers a hook of torch for all optimizers.
        model = torch.nn.Linear(2, 2)
        saver = mp_optim.AdamW(model.parameters())
        mp_optim.checkpoint.save(tmp_path, model, saver, asynchronous=True).wait()
    passes: list[int] = []
    measure = step.measure
    monkeypatch.setattr(
        step, "measure", lambda grads, *how: passes.append(len(grads)) or measure(grads, *how)
    )
    optimizer.step()
    assert passes == [sum(map(len, params.values()))]


# -- lives ----------------------------------------------------------------------------------------


def test_multi_tenant_frees_state_at_once_when_a_tenant_is_removed_or_offloaded(tmp_path):
    optimizer, params = adapters()
    gone = []
    for name in "ab":
        state = optimizer[name].state[params[name][0]]
        gone += [weakref.ref(value) for key, value in state.items() if key != "step"]
        del state
    tenant = weakref.ref(optimizer["a"])
    kept = optimizer["c"].state[params["c"][0]]["exp_avg"]
    gc.disable()
    try:
        optimizer.remove_tenant("a")
        optimizer.offload_tenant("b", tmp_path / "b")
        assert tenant() is None and all(reference() is None for reference in gone)
    finally:
        gc.enable()
    assert len(gone) == 6 and optimizer["c"].state[params["c"][0]]["exp_avg"] is kept


def test_multi_tenant_reuses_launches_of_other_tenants_when_a_tenant_joins_or_leaves(monkeypatch):
    optimizer, params = adapters()
    for some in params.values():
        give_grads(some)
    optimizer.step()
    executor, planned = type(optimizer["a"].executor), []
    plan = executor._planned
    monkeypatch.setattr(
        executor, "_planned", lambda self, *given: planned.append(self) or plan(self, *given)
    )
    optimizer.remove_tenant("b")
    optimizer.add_tenant("d", params.pop("b"))
    give_grads(params["a"])
    optimizer.step(["c", "a"])
    assert not planned
    optimizer.step("d")
    assert len(planned) == 1


def test_torch_scheduler_of_one_tenant_changes_no_learning_rate_of_other_tenants():
    optimizer, params = adapters()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer["a"], gamma=0.5)
    for some in params.values():
        give_grads(some)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a schedule without a step
        scheduler.step()
    assert [optimizer[name].param_groups[0]["lr"] for name in "ab"] == [5e-3, 1e-2]
    optimizer.zero_grad("a")
    assert [params[name][0].grad is None for name in "ab"] == [True, False]


def test_tenant_stays_offloaded_when_the_file_of_the_tenant_is_damaged(tmp_path):
    optimizer, _ = adapters()
    optimizer.offload_tenant("a", tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[: len(content) // 2])
    with pytest.raises(RuntimeError, match="tenant 'a'"):
        optimizer.restore_tenant("a")
    with pytest.raises(RuntimeError, match="is offloaded"):
        optimizer["a"].step()
    (tmp_path / "a").write_bytes(content)
    optimizer.restore_tenant("a")
    assert not (tmp_path / "a").exists()


# -- refused calls --------------------------------------------------------------------------------


def test_add_tenant_accepts_params_without_elements_on_this_rank():
    """Tensors without elements have the address 0, which must not count as shared memory."""
    optimizer = MultiTenantOptimizer(lr=1e-2)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        for name in "ab":
            part: Any = DTensor.from_local(
                torch.empty(0, 4), mesh, [Shard(0)], shape=torch.Size((1, 4)), stride=(4, 1)
            )
            optimizer.add_tenant(name, [nn.Parameter(part)])
    assert list(optimizer) == ["a", "b"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda o, p: o.step(["a", "x"]), ValueError, "name='x': no tenant has this name"),
        (lambda o, p: o.step(["a", "a"]), ValueError, "'a' occurs twice"),
        (lambda o, p: o.step(["a", "c"]), ValueError, r"call restore_tenant\('c'\) first"),
        (lambda o, p: o["c"].step(), RuntimeError, r"call restore_tenant\('c'\) first"),
        (lambda o, p: o["c"].state_dict(), RuntimeError, r"call restore_tenant\('c'\) first"),
        (lambda o, p: o.save_tenant("c"), ValueError, r"call restore_tenant\('c'\) first"),
        (lambda o, p: o.restore_tenant("a"), ValueError, "name='a': this tenant is not offloaded"),
        (lambda o, p: o.remove_tenant("x"), ValueError, "name='x': no tenant has this name"),
        (lambda o, p: o.add_tenant("a", [p]), ValueError, r"call remove_tenant\('a'\) first"),
        (lambda o, p: o.add_tenant("x", [p]), ValueError, "of tenant 'a'; give each tenant"),
        (
            lambda o, p: o.add_tenant("x", [nn.Parameter(torch.ones(2))], lrr=1.0),
            TypeError,
            "tenant 'x': unexpected argument 'lrr'; did you mean 'lr'",
        ),
        (
            lambda o, p: o.add_tenant("x", [nn.Parameter(torch.ones(2))], lr=-1.0),
            ValueError,
            "tenant 'x': lr=-1.0",
        ),
        (lambda o, p: o.load_tenant("a", o.save_tenant("wide")), ValueError, "tenant 'a': .*shape"),
        (lambda o, p: MultiTenantOptimizer(lrr=1.0), TypeError, "did you mean 'lr'"),
    ],
)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_multi_tenant_changes_nothing_when_a_call_is_refused(call, error, message, place, tmp_path):
    optimizer, params = adapters()
    optimizer.add_tenant("wide", [nn.Parameter(torch.ones(9, 7).bfloat16()) for _ in params["a"]])
    optimizer.offload_tenant("c", tmp_path / "c" if place == "disk" else None)
    for some in params.values():
        give_grads(some)
    before = bits(optimizer["a"], params["a"])
    with pytest.raises(error, match=message):
        call(optimizer, params["a"][0])
    assert list(optimizer) == ["a", "b", "c", "wide"]
    assert all(map(same_bits, before, bits(optimizer["a"], params["a"])))
    optimizer.restore_tenant("c")
    assert all(result.success for result in optimizer.step(["a", "b", "c"]).values())
