"""Guards of our backends against silent faults of apex and Transformer Engine. The stand-ins have
these faults, so each test fails without its guard."""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.core import Slot, SlotUpdate
from mp_optim.core.slot_state import REMAINDER
from mp_optim.host import accelerator
from mp_optim.kernels import choose_backend, multi_tensor
from mp_optim.kernels import chunking as batching
from mp_optim.kernels.codecs import join
from mp_optim.kernels.kernel_args import AdamScalars, LambScalars, SgdScalars, TensorLists
from mp_optim.kernels.multi_tensor import (
    CHUNK_ELEMENTS,
    MOST_ELEMENTS,
    MOST_TENSORS,
    ApexBackend,
    TransformerEngineBackend,
    check_launch,
)
from mp_optim.kernels.reference import ReferenceBackend, step_with
from mp_optim.rules.fused import FusedAdam, FusedLAMB
from support import kernel_cases
from support.differences import Deviation
from support.standins import amp_c, te

CPU = torch.device("cpu")
GROUP: dict[str, Any] = {**kernel_cases.GROUP, "lr": 0.01}
each_library = pytest.mark.parametrize("name", ["apex", "transformer_engine"])


def lists(
    *sizes: int,
    grad: torch.dtype = torch.float32,
    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq"),
    output: torch.dtype | None = None,
) -> TensorLists:
    return TensorLists(
        [torch.linspace(-1, 1, n) for n in sizes],
        [torch.linspace(-2, 1, n).to(grad) for n in sizes],
        {key: [torch.zeros(n) for n in sizes] for key in keys},
        [None if output is None else torch.zeros(n, dtype=output) for n in sizes],
    )


def joined(parts: list[TensorLists]) -> TensorLists:
    return TensorLists(
        [main for part in parts for main in part.main],
        [grad for part in parts for grad in part.grad],
        {key: [each for part in parts for each in part.state[key]] for key in parts[0].state},
        [output for part in parts for output in part.output],
    )


def backend_of(name: str) -> Any:
    return choose_backend(name, CPU)[0]


def assert_close(ours: TensorLists, theirs: TensorLists) -> None:
    found = Deviation()
    for a, b in zip(ours.main, theirs.main, strict=True):
        found.params(a, b, GROUP["lr"])
    assert found.tolerable, found


@each_library
def test_backend_launches_one_dtype_per_list_for_mixed_gradients(standins, name):
    kinds = [
        (torch.float32, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ]
    kinds += [(torch.float64, None), (torch.bfloat16, None), (torch.float32, None)]
    made = []
    for backend in (backend_of(name), ReferenceBackend()):
        both = joined([lists(40, grad=grad, output=output) for grad, output in kinds])
        backend.step("adam", both, AdamScalars.at(GROUP, 1), 1.0)
        made.append(both)
    assert_close(*made)
    assert torch.equal(made[0].output[1], made[0].main[1].bfloat16())
    grads = made[0].grad[:3]
    assert backend_of(name).sum_of_squares(grads).tolist() == pytest.approx(
        ReferenceBackend().sum_of_squares(grads).tolist(), rel=1e-5
    )
    assert standins.damage == []


def test_check_launch_refuses_tensor_lists_of_wrong_length_dtype_stride_or_device(standins):
    good, full = [[torch.zeros(4)], [torch.zeros(4)]], [torch.float32] * 2
    check_launch("k", good, full)
    bad: list[Any] = [
        [],
        [[], []],
        [[torch.zeros(4)], []],
        [[torch.zeros(4)], [torch.zeros(4, dtype=torch.bfloat16)]],
        [[torch.zeros(4)], [torch.zeros(5)]],
        [[torch.zeros(0)], [torch.zeros(0)]],
        [[torch.zeros(4)], [torch.zeros(8)[::2]]],
        [[torch.zeros(4)], [torch.zeros(4, device="meta")]],
        [[torch.zeros(4, device="meta")]] * 2,
    ]
    for made in bad:
        with pytest.raises(ValueError, match="k: needs lists of"):
            check_launch("k", made, full)


@each_library
def test_backend_refuses_host_tensors_before_a_kernel_is_launched(standins, name, monkeypatch):
    backend = backend_of(name)
    monkeypatch.setattr(multi_tensor, "KERNEL_DEVICE", "cuda")
    calls = len(standins.calls)
    for run in (
        lambda: backend.step("adam", lists(5), AdamScalars.at(GROUP, 1), 1.0),
        lambda: backend.step(
            "sgd", lists(5, keys=("momentum_buffer",)), SgdScalars.at(GROUP, 1), 1.0
        ),
        *([lambda: backend.lamb(lists(5), LambScalars.at(GROUP, 1), 1.0)] * (name == "apex")),
    ):
        with pytest.raises(ValueError, match=r"needs lists of .* on cuda, .*'cpu'"):
            run()
    assert len(standins.calls) == calls and standins.damage == []


@each_library
def test_sgd_starts_momentum_of_each_parameter_at_its_first_step(standins, name):
    """apex decides by the last parameter whether a launch is the first step of all parameters."""
    from mp_optim.rules.rule_optimizer import RuleOptimizer

    results = []
    for backend in (name, "reference"):
        params = [torch.ones(5), torch.ones(6)]
        optimizer = RuleOptimizer(
            "sgd", params, lr=0.1, momentum=0.9, dampening=0.5, backend=backend
        )
        for slots in ([0], [0, 1]):
            optimizer.step_slots([SlotUpdate(Slot(0, i), torch.ones(5 + i)) for i in slots])
        results.append(torch.cat(params))
    assert torch.allclose(*results, rtol=0, atol=1e-6)


@each_library
def test_bf16_model_keeps_small_updates_in_main_params(standins, name):
    """bfloat16 parameters would round every one of these small steps away. apex ignores
    master_weights=True."""
    model = nn.Linear(8, 8, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    config = OptimizerConfig(
        lr=1e-4, bf16=True, weight_decay=0.0, clip_grad=0.0, fused_backend=name
    )
    optimizer = get_megatron_optimizer(config, model)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert float(dict(optimizer.named_main_params())["weight"].mean()) == pytest.approx(
        0.99, abs=1e-4
    )
    assert float(model.weight.detach().float().mean()) == pytest.approx(0.99, abs=2**-8)
    assert "multi_tensor_adam" in standins.calls
    assert name in str(optimizer.describe())


def test_backend_uses_the_reference_backend_when_a_moment_dtype_has_no_kernel(standins):
    for dtypes in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16,) * 2,
    ):
        for name in ("apex", "transformer_engine"):
            ours, theirs, backend = lists(100), lists(100), backend_of(name)
            for made in (ours, theirs):
                for key, dtype in zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True):
                    made.state[key] = [x.to(dtype) for x in made.state[key]]
            before = len(standins.calls)
            backend.step("adam", ours, AdamScalars.at(GROUP, 1), 1.0)
            ReferenceBackend().step("adam", theirs, AdamScalars.at(GROUP, 1), 1.0)
            assert_close(ours, theirs)
            stepped_by_kernel = standins.calls[before:].count("multi_tensor_adam")
            assert stepped_by_kernel == (name == "transformer_engine" and len(set(dtypes)) == 1)
    assert standins.damage == []


@each_library
def test_backend_cuts_tensors_beyond_32_bit_indices_into_pieces(standins, name, monkeypatch):
    standins.int_max = 5000
    monkeypatch.setattr(batching, "piece_elements", lambda device: 4096)
    monkeypatch.setattr(multi_tensor, "MOST_ELEMENTS", 5000)
    for rule, keys in (
        ("adam", ("exp_avg", "exp_avg_sq")),
        ("sgd", ("momentum_buffer",)),
        ("lamb", ("exp_avg", "exp_avg_sq")),
    ):
        ours, theirs = lists(12_345, 700, keys=keys), lists(12_345, 700, keys=keys)
        step_with(backend_of(name), rule, ours, GROUP, 1, 0.5)
        step_with(ReferenceBackend(), rule, theirs, GROUP, 1, 0.5)
        assert_close(ours, theirs)
    sums = backend_of(name).sum_of_squares([torch.ones(12_345), torch.ones(3)])
    assert sums.tolist() == pytest.approx([12_345, 3], rel=1e-5)
    assert standins.damage == []


def test_batches_cut_tensors_below_2_to_the_31_elements():
    assert MOST_ELEMENTS + CHUNK_ELEMENTS <= 2**31 - 1
    huge = torch.empty(2**31 + 10, dtype=torch.bfloat16, device="meta")
    sizes = [
        t.numel()
        for _, batch in batching.batches(TensorLists([huge], [huge], {}, [None]))
        for t in batch.main
    ]
    assert sum(sizes) == 2**31 + 10 and max(sizes) < MOST_ELEMENTS


def test_kernel_batches_are_filled_up_to_the_element_limit():
    sizes = enumerate([2, 2, 1, 3, 9, 4])
    assert list(batching.runs_of(sizes, 4)) == [[0, 1], [2, 3], [4], [5]]


def test_transformer_engine_steps_4010_tensors_like_reference_despite_the_handle_limit(standins):
    assert MOST_TENSORS * 5 < te.HANDLES
    ours, theirs = (lists(*[2] * 4010, output=torch.bfloat16) for _ in range(2))
    backend_of("transformer_engine").step("adam", ours, AdamScalars.at(GROUP, 1), 1.0)
    ReferenceBackend().step("adam", theirs, AdamScalars.at(GROUP, 1), 1.0)
    assert_close(ours, theirs)


def test_apex_lamb_does_not_clip_large_gradients_inside_the_kernel(standins):
    """apex divides every gradient by infinity when max_grad_norm is 0."""
    ours, theirs = lists(200), lists(200)
    ours.grad[0].mul_(1e4), theirs.grad[0].mul_(1e4)
    ApexBackend(amp_c.module()).lamb(ours, LambScalars.at(GROUP, 1), 1.0)
    ReferenceBackend().lamb(theirs, LambScalars.at(GROUP, 1), 1.0)
    assert_close(ours, theirs)
    assert ours.state["exp_avg"][0].abs().max() > 1e3
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="lamb", lr=0.01, clip_grad=0.0, fused_backend="apex"),
        nn.Linear(4, 4),
    )
    assert optimizer.optimizer.param_groups[0]["max_grad_norm"] == 0.0


def test_sharded_lamb_uses_the_reference_backend_when_apex_is_chosen(standins):
    """apex's kernel would use the norm of the shard, which differs from the norm of the
    parameter."""
    results = []
    for name in ("apex", "reference"):
        param = torch.linspace(-1, 1, 50)
        optimizer = FusedLAMB([param], lr=0.01, max_grad_norm=0.0, backend=name)
        del standins.calls[:]
        with pytest.MonkeyPatch.context() as patch:
            # simulates four ranks
            patch.setattr(dist, "all_reduce", lambda sums, op, group, async_op: sums[:, 0].mul_(4))
            patch.setattr("mp_optim.kernels.sums.wait_for", lambda *_: None)
            no_guard = lambda group: lambda doing: contextlib.nullcontext()  # noqa: E731
            patch.setattr("mp_optim.kernels.sums.naming_missing_ranks", no_guard)
            group = type("Group", (), {"size": lambda self: 4})()
            optimizer.step_slots([SlotUpdate(Slot(0, 0), torch.ones(50), 1.0, None, (group,))])
        results.append(param)
    assert "multi_tensor_lamb" not in standins.calls and torch.equal(*results)


def split_lists(values: list[float], grads: list[float]) -> TensorLists:
    made = TensorLists(
        [torch.tensor(values, dtype=torch.bfloat16)],
        [torch.tensor(grads, dtype=torch.bfloat16)],
        {"exp_avg": [torch.zeros(len(values))], "exp_avg_sq": [torch.zeros(len(values))]},
        [None],
    )
    made.state[REMAINDER] = [torch.zeros(len(values), dtype=torch.int16)]
    return made


def test_transformer_engine_makes_parameter_nan_when_gradient_is_nan(standins):
    """Without our guard, Transformer Engine splits CUDA's NaN into a bfloat16 -0.0, and training
    would continue."""
    made = split_lists([1.0, 2.0], [math.nan, 1.0])
    te_backend = TransformerEngineBackend(te.modules()["transformer_engine_torch"])
    te_backend.step("adam", made, AdamScalars.at(GROUP, 1), 1.0)
    assert made.main[0][0].isnan() and made.main[0][1].isfinite()
    assert join(made.main[0], made.state[REMAINDER][0])[0].isnan()
    assert standins.calls[-1] == "multi_tensor_adam_param_remainder"


def test_transformer_engine_ignores_remainders_of_zero_parameters(standins):
    """The kernel would subtract the remainder from a parameter that other code set to zero, and
    make a NaN."""
    made = split_lists([0.0, -0.0, 1.0], [0.5, 0.5, 0.5])
    theirs = split_lists([0.0, -0.0, 1.0], [0.5, 0.5, 0.5])
    for each in (made, theirs):
        each.state[REMAINDER][0].fill_(-5)
    backend = TransformerEngineBackend(te.modules()["transformer_engine_torch"])
    backend.step("adam", made, AdamScalars.at(GROUP, 1), 1.0)
    ReferenceBackend().step("adam", theirs, AdamScalars.at(GROUP, 1), 1.0)
    found = Deviation()
    found.params(
        join(made.main[0], made.state[REMAINDER][0]),
        join(theirs.main[0], theirs.state[REMAINDER][0]),
        0.01,
    )
    assert found.tolerable, found


class Operations(TorchDispatchMode):
    """Records the names of all operations except views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_transformer_engine_step_runs_equally_many_guard_operations_for_any_tensor_count(
    standins, monkeypatch
):
    library = te.modules()["transformer_engine_torch"]
    launched: list[int] = []
    monkeypatch.setattr(
        library,
        "multi_tensor_adam_param_remainder",
        lambda chunk, flag, lists, *rest: launched.append(len(lists[0])),
    )
    counted = []
    for tensors in (1, 2, 70):
        made = joined([split_lists([0.0, 1.0], [1.0, 1.0]) for _ in range(tensors)])
        with Operations() as operations:
            TransformerEngineBackend(library).step("adam", made, AdamScalars.at(GROUP, 1), 1.0)
        counted.append(operations.names)
    assert launched == [1, 2, 70]
    assert counted[0] == counted[1] == counted[2] and 0 < len(counted[0]) < 20


def test_current_device_enters_the_cuda_device_of_the_tensors(monkeypatch):
    """Transformer Engine launches on the stream of the current device, even if the tensors are on
    another device."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    accelerator.current_device(torch.device("cuda", 3))
    accelerator.current_device(CPU)
    assert entered == [torch.device("cuda", 3)]


@each_library
def test_loaded_moments_stay_fp32_for_a_bf16_model(standins, name):
    """torch's load_state_dict casts state to the parameter's dtype, but the kernels read FP32."""
    model = nn.Linear(4, 4).bfloat16()
    config = OptimizerConfig(lr=0.01, bf16=True, fused_backend=name)
    optimizer = get_megatron_optimizer(config, model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    again = get_megatron_optimizer(config, model)
    again.load_state_dict(optimizer.state_dict())
    state = again.optimizer.slot_state(Slot(0, 0))
    assert state["exp_avg"].dtype == torch.float32 and state["step"] == 1
    assert torch.equal(state["exp_avg"], optimizer.optimizer.slot_state(Slot(0, 0))["exp_avg"])
    again.step()
    assert standins.damage == []


def test_apex_step_is_not_skipped_when_fp32_norm_would_overflow(standins):
    """Gradients above 1.8e19 make apex's FP32 norm infinite, so the step would be skipped."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, fused_backend="apex"), model)
    model.weight.grad = torch.full((4, 4), 1e25)
    success, norm, _ = optimizer.step()
    assert success and norm == pytest.approx(4e25, rel=1e-5)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**20, 2.0**32])
def test_fp16_lamb_moves_parameters_unless_the_scale_overflows(standins, scale):
    """With the default scale of 2^32 the first steps overflow and are skipped, which would hide a
    step without effect."""
    results = []
    for name in ("apex", "reference"):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False).half()
        before = model.weight.detach().clone()
        config = OptimizerConfig(
            optimizer="lamb", lr=0.01, fp16=True, initial_loss_scale=scale, fused_backend=name
        )
        optimizer = get_megatron_optimizer(config, model)
        model.weight.grad = (torch.full((8, 8), 1e-2) * optimizer.get_loss_scale()).half()
        success, _, _ = optimizer.step()
        moved = not torch.equal(model.weight.detach(), before)
        state = optimizer.optimizer.slot_state(Slot(0, 0))
        assert success == moved == bool(state["exp_avg"].any()) == (scale < 2.0**22)
        assert state["step"] == int(moved)
        results.append(dict(optimizer.named_main_params())["weight"].detach())
    found = Deviation()
    found.params(*results, 0.01)
    assert found.tolerable


@each_library
def test_step_count_of_an_empty_shard_increases(standins, name):
    """All ranks must have the same step count, also ranks without elements of a parameter."""
    optimizer = FusedAdam([{"params": [torch.zeros(0)]}, {"params": [torch.ones(3)]}], backend=name)
    optimizer.step_slots(
        [SlotUpdate(Slot(0, 0), torch.zeros(0)), SlotUpdate(Slot(1, 0), torch.ones(3))]
    )
    assert [int(optimizer.slot_state(Slot(g, 0))["step"]) for g in (0, 1)] == [1, 1]


def test_apex_refuses_host_parameters_and_reference_steps_host_parameters(standins, monkeypatch):
    """In ColossalAI #6401 and #6418, host parameters are copied to the GPU, and only the copies are
    updated."""
    monkeypatch.setattr(multi_tensor, "KERNEL_DEVICE", "meta")  # any device type except the host's
    backend, why = choose_backend("reference", CPU)
    made = lists(50)
    before = made.main[0].clone()
    backend.lamb(made, LambScalars.at(GROUP, 1), 1.0)
    assert not torch.equal(made.main[0], before), why
    with pytest.raises(ValueError, match=r"on meta, .*given .*cpu"):
        ApexBackend(amp_c.module()).lamb(made, LambScalars.at(GROUP, 1), 1.0)
