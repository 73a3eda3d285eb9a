"""Float8 model parameters: FP32 main params in every placement, and codes that round them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from mp_optim import checkpoint, get_megatron_optimizer
from mp_optim.apps.float8 import quantize_weights
from mp_optim.core.quantized import FLOAT8_DTYPES, dequantized, quantize_, scaled_codes
from mp_optim.zero.buckets import check_shardable
from support.models import DTYPES, TinyMoE, config_for, is_expert, same_bits, tokens_of, train
from support.offload import MODES, differing, hybrids
from support.one_rank import one_rank

E4M3 = torch.float8_e4m3fn


def build(
    precision: str = "bf16",
    fraction: float = 0.0,
    *,
    rowwise: bool = False,
    dtype: torch.dtype = E4M3,
    **settings: object,
) -> tuple[nn.Module, object]:
    model = TinyMoE(DTYPES[precision.split("-")[0]])
    quantize_weights(model, dtype, rowwise=rowwise)
    return model, get_megatron_optimizer(
        config_for(precision, fraction, **settings), model, expert_predicate=is_expert
    )


def everything(model: nn.Module, optimizer: object) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found | {
        f"main {name}": value.detach().clone() for name, value in optimizer.named_main_params()
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("blocks", [(), (1, 1), (5, 1), (5, 7), (2, 3), (3, 2), (5, 3)])
def test_float8_scale_gives_the_largest_magnitude_of_each_block_the_largest_code(
    dtype: torch.dtype, blocks: tuple[int, ...]
) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 10
    values[0, 0], values[3, 4] = 1e-30, 0.0
    scale, codes = scaled_codes(values, blocks, dtype)
    assert scale.shape == blocks and codes.shape == values.shape and codes.dtype == dtype
    heights, widths = (
        math.ceil(size / count) for size, count in zip((5, 7), blocks or (1, 1), strict=True)
    )
    top = torch.finfo(dtype).max
    for row in range(0, 5, heights):
        for column in range(0, 7, widths):
            block = values[row : row + heights, column : column + widths]
            here = scale.reshape(blocks or (1, 1))[row // heights, column // widths]
            assert here == (
                torch.tensor(1.0)
                if block.abs().max() == 0
                else (block.abs().max() / top).clamp(2.0**-126)
            )
            expected = (block / here).clamp(-top, top).to(dtype)
            assert same_bits(
                codes[row : row + heights, column : column + widths].float(), expected.float()
            )


def test_float8_codes_stay_finite_for_zero_empty_and_tiny_tensors() -> None:
    scale, codes = scaled_codes(torch.zeros(3, 4), (), E4M3)
    assert scale == 1.0 and codes.float().eq(0).all()
    scale, codes = scaled_codes(torch.zeros(0, 4), (0, 1), E4M3)
    assert scale.shape == (0, 1) and codes.shape == (0, 4)
    scale, codes = scaled_codes(torch.full((2,), 1e-44), (), E4M3)
    assert scale == 2.0**-126 and codes.float().isfinite().all()


def test_float8_codes_do_not_change_when_quantized_again() -> None:
    param = nn.Parameter(torch.empty(16, 8, dtype=E4M3))
    param.fp8_scale = torch.ones(16, 1)
    quantize_(param, torch.randn(16, 8, generator=torch.Generator().manual_seed(2)))
    before = _bytes(param.detach().clone())
    quantize_(param, dequantized(param))
    assert torch.equal(_bytes(param.detach()), before)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("bf16", "sgd"),
        ("bf16", "muon"),
        ("fp16", "lion"),
        ("bf16-stochastic", "adam"),
        ("bf16-8bit", "lamb"),
    ],
)
def test_float8_training_gives_equal_bits_for_every_offload_fraction(
    precision: str, optimizer: str
) -> None:
    expected = None
    for fraction in (0.0, 0.5, 1.0):
        model, stack = build(precision, fraction, optimizer=optimizer)
        losses = train(model, stack, 6)
        found = (losses, everything(model, stack))
        expected = expected or found
        assert found[0] == expected[0] and differing(found[1], expected[1]) == []
    for name, param in model.named_parameters():
        if param.dtype == E4M3:
            main = found[1][f"main {name}"]
            scale, codes = scaled_codes(main, param.fp8_scale.shape, E4M3)
            assert torch.equal(scale, param.fp8_scale)
            assert torch.equal(_bytes(codes), _bytes(param.detach()))


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_float8_training_gives_equal_bits_for_every_offload_mode(mode: str, clip: float) -> None:
    results = []
    for which in ("sync", mode):
        model, stack = build("bf16", 1.0, clip_grad=clip, offload_mode=which, rowwise=True)
        assert hybrids(stack)
        results.append((train(model, stack, 6), everything(model, stack)))
    assert results[0][0] == results[1][0] and differing(results[0][1], results[1][1]) == []


@pytest.mark.parametrize(("rowwise", "dtype"), [(False, E4M3), (True, torch.float8_e5m2)])
def test_float8_training_reaches_the_bf16_loss_within_2_percent(
    rowwise: bool, dtype: torch.dtype
) -> None:
    ends = []
    for quantised in (False, True):
        model = TinyMoE(torch.bfloat16)
        if quantised:
            quantize_weights(model, dtype, rowwise=rowwise)
        stack = get_megatron_optimizer(config_for("bf16", lr=1e-2), model)
        ends.append(sum(train(model, stack, 40)[-5:]) / 5)
    assert abs(ends[1] - ends[0]) < 0.02 * ends[0]


def test_float8_codes_change_after_many_updates_below_float8_resolution() -> None:
    model = nn.Linear(8, 8, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    quantize_weights(model, rowwise=True)
    param = next(model.parameters())
    plain = {"sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    stack = get_megatron_optimizer(config_for("bf16", optimizer="sgd", lr=1e-3, **plain), model)
    before = dequantized(param)
    for _ in range(100):
        param.grad = torch.zeros(8, 8, dtype=torch.bfloat16)
        param.grad[:, 0] = 1.0
        stack.step()
    assert before[0, 0] - dequantized(param)[0, 0] == pytest.approx(0.1, abs=1 / 16)
    assert before[0, 0] != dequantized(param)[0, 0]


def test_float8_codes_and_scales_do_not_change_in_a_skipped_step() -> None:
    model, stack = build("fp16", 0.5)
    train(model, stack, 2)
    before = everything(model, stack)
    for param in model.parameters():
        param.grad = torch.full(param.shape, math.inf, dtype=param.grad_dtype)
    stack.get_loss_scale()  # This call marks the gradients as scaled.
    assert not stack.step().success
    assert differing(everything(model, stack), before) == []


def test_float8_param_is_not_written_when_its_gradient_is_missing() -> None:
    model, stack = build("bf16", 0.5)
    train(model, stack, 1)
    param = model.experts.parametrizations.up.original
    stack.zero_grad()
    model(tokens_of(3)).backward()
    param.grad = None
    version, codes = param._version, _bytes(param.detach().clone())
    stack.step()
    assert param._version == version and torch.equal(_bytes(param.detach()), codes)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_float8_step_continues_from_values_loaded_into_the_model(fraction: float) -> None:
    model, stack = build("bf16", fraction)
    other, _ = build("bf16", fraction)
    train(model, stack, 2)
    with torch.no_grad():
        for param in other.parameters():
            if param.dtype == E4M3:
                quantize_(param, dequantized(param) * 3)
    mains = dict(stack.named_main_params())
    kept = {name: value.detach().clone() for name, value in mains.items()}
    # The loaded values are equal, so main params keep their extra bits.
    model.load_state_dict(model.state_dict())
    stack.zero_grad()
    stack.step()
    assert all(torch.equal(value, kept[name]) for name, value in stack.named_main_params())
    model.load_state_dict(other.state_dict())
    stack.step()
    for name, param in model.named_parameters():
        if param.dtype == E4M3:
            assert torch.equal(dict(stack.named_main_params())[name], dequantized(param))


def test_step_continues_when_a_bf16_param_is_replaced_by_a_float8_param() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    half = nn.Parameter(weight.bfloat16())
    stack = get_megatron_optimizer(config_for("bf16"), nn.ParameterList([half]))
    codes = nn.Parameter(torch.empty(8, 8, dtype=E4M3))
    codes.fp8_scale, codes.grad_dtype = torch.ones(()), torch.bfloat16
    quantize_(codes, half.detach().float())
    for param in (half, codes, half):
        stack.param_groups[0]["params"][0] = param
        param.grad = torch.ones(8, 8, dtype=torch.bfloat16)
        before = dequantized(param) if param is codes else param.detach().clone()
        stack.step()
        assert not torch.equal(dequantized(param) if param is codes else param.detach(), before)


@pytest.mark.parametrize("fractions", [(0.0, 1.0), (1.0, 0.5)])
def test_float8_resume_gives_equal_bits_in_another_placement(
    tmp_path, fractions: tuple[float, float]
) -> None:
    model, stack = build("bf16", fractions[0])
    train(model, stack, 3)
    checkpoint.save(tmp_path, model, stack)
    expected = (train(model, stack, 3, start=3), everything(model, stack))
    model, stack = build("bf16", fractions[1])
    checkpoint.load(tmp_path, model, stack)
    assert train(model, stack, 3, start=3) == expected[0]
    assert differing(everything(model, stack), expected[1]) == []


class SelfQuantized(Tensor):
    """Stand-in for a tensor that quantizes itself, like the tensors of Transformer Engine:
    nominally bfloat16, stored as codes and a scale, used by public methods only."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> SelfQuantized:
        return Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.bfloat16, device=codes.device
        )

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.own_scale, self.initial, self.quantised = codes, scale, None, 0

    @classmethod
    def make(cls, values: Tensor) -> SelfQuantized:
        scale, codes = scaled_codes(values.float(), (), E4M3)
        return cls(codes, scale)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        return (self.codes.float() * self.own_scale).to(dtype or torch.bfloat16)

    def quantize_(self, tensor: Tensor) -> SelfQuantized:
        assert type(tensor) is Tensor and tensor.device == self.device
        self.own_scale, self.codes = scaled_codes(tensor.float(), (), E4M3)
        self.quantised += 1
        return self

    def detach(self) -> SelfQuantized:
        return SelfQuantized(self.codes, self.own_scale)

    def get_high_precision_init_val(self) -> Tensor | None:
        return self.initial

    def clear_high_precision_init_val(self) -> None:
        self.initial = None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func == torch.ops.aten.detach.default:
            return args[0].detach()
        if func == torch.ops.aten.empty_like.default:
            return SelfQuantized(torch.empty_like(args[0].codes), torch.ones(()))
        assert not func._schema.is_mutable, f"{func} writes a quantised tensor"
        plain = [arg.dequantize() if isinstance(arg, SelfQuantized) else arg for arg in args]
        return func(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl


def self_quantised(
    keep: bool = False, fraction: float = 0.0, **settings: object
) -> tuple[nn.Module, object]:
    model = TinyMoE(torch.bfloat16)
    for module, name in (
        (model, "dense"),
        (model, "router"),
        (model.experts, "up"),
        (model.experts, "down"),
    ):
        values = getattr(module, name).detach()
        param = nn.Parameter(SelfQuantized.make(values))
        param.initial = values.clone() if keep else None
        setattr(module, name, param)
    return model, get_megatron_optimizer(
        config_for("bf16", fraction, **settings), model, expert_predicate=is_expert
    )


def ours(model: nn.Module) -> list[SelfQuantized]:
    return [param for param in model.parameters() if isinstance(param, SelfQuantized)]


@pytest.mark.parametrize("mode", MODES)
def test_self_quantized_params_give_equal_bits_for_every_placement(mode: str) -> None:
    expected = None
    for fraction in (0.0, 0.5, 1.0):
        modes = {"offload_mode": mode} if fraction else {}
        model, stack = self_quantised(fraction=fraction, **modes)
        found = train(model, stack, 6)
        assert [param.quantised for param in ours(model)] == [6] * 4
        mains = {name: value.clone() for name, value in stack.named_main_params()}
        expected = expected or (found, mains, [param.dequantize() for param in ours(model)])
        assert found == expected[0] and differing(mains, expected[1]) == []
        assert all(map(torch.equal, [param.dequantize() for param in ours(model)], expected[2]))
    assert found[-1] < found[0]


def test_main_params_start_from_the_values_before_quantization() -> None:
    values = TinyMoE(torch.bfloat16).dense.detach()
    model, stack = self_quantised(keep=True)
    assert torch.equal(dict(stack.named_main_params())["dense"], values.float())
    assert all(param.initial is None for param in ours(model))
    model, stack = self_quantised()
    assert torch.equal(
        dict(stack.named_main_params())["dense"], model.dense.dequantize(dtype=torch.float32)
    )


def test_step_continues_from_a_replaced_self_quantized_param() -> None:
    model, stack = self_quantised()
    train(model, stack, 2)
    before = {name: value.clone() for name, value in stack.named_main_params()}
    same = SelfQuantized(model.dense.codes.clone(), model.dense.own_scale.clone())
    stack.zero_grad()
    _replace(model, stack, same)
    stack.step()
    assert (
        differing({name: value.clone() for name, value in stack.named_main_params()}, before) == []
    )
    assert stack.metrics()["reloaded_params"] == 0
    _replace(model, stack, SelfQuantized.make(torch.full((8, 8), 0.25)))
    stack.step()
    assert stack.metrics()["reloaded_params"] == 1
    assert torch.equal(dict(stack.named_main_params())["dense"], torch.full((8, 8), 0.25))


def _replace(model: nn.Module, stack: object, value: SelfQuantized) -> None:
    old, new = model.dense, nn.Parameter(value)
    for group in stack.param_groups:
        group["params"] = [new if param is old else param for param in group["params"]]
    model.dense = new


def float8_param(*shape: int) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(*shape, dtype=E4M3))
    param.fp8_scale, param.grad_dtype = torch.ones(()), torch.bfloat16
    return param


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (None, "0 is torch.float8_e4m3fn and has no scale"),
        (
            torch.ones((), dtype=torch.float64),
            "0.fp8_scale is torch.float64 on cpu, but must be float32 on cpu",
        ),
        (torch.ones(3), r"0.fp8_scale has shape \(3,\)"),
        (torch.ones(9, 1), r"and the parameter \(8, 4\); give the scale shape"),
        (torch.ones(0, 1), "is the number of blocks along it, from 1"),
    ],
)
def test_factory_refuses_a_float8_scale_of_wrong_shape_or_dtype(
    scale: Tensor | None, text: str
) -> None:
    param = float8_param(8, 4)
    param.fp8_scale = scale
    with pytest.raises(ValueError, match=text):
        get_megatron_optimizer(config_for("bf16"), nn.ParameterList([param]))


def test_float8_params_are_refused_by_fp32_zero_and_dtensor_optimizers(tmp_path) -> None:
    with pytest.raises(TypeError, match="FP32Optimizer takes float32 parameters"):
        get_megatron_optimizer(config_for("fp32"), nn.ParameterList([float8_param(8, 4)]))
    with pytest.raises(
        ValueError, match=r"p is a Parameter of torch\.float8_e4m3fn: flat buckets store"
    ):
        check_shardable([("p", float8_param(8, 4))])
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        split = nn.Parameter(DTensor.from_local(torch.zeros(8, 4, dtype=E4M3), mesh, [Replicate()]))
        with pytest.raises(TypeError, match=r"0 is a DTensor of Tensor torch\.float8_e4m3fn"):
            get_megatron_optimizer(config_for("bf16"), nn.ParameterList([split]))


def test_step_refuses_a_float8_gradient() -> None:
    param = nn.Parameter(torch.zeros(8, 4, dtype=E4M3))
    param.fp8_scale = torch.ones(())
    stack = get_megatron_optimizer(config_for("bf16"), nn.ParameterList([param]))
    param.grad = torch.zeros(8, 4, dtype=E4M3)
    with pytest.raises(TypeError, match=r"set grad_dtype=torch\.bfloat16"):
        stack.step()


def test_quantize_weights_names_unsupported_modules() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16: this is not a float8 dtype"):
        quantize_weights(nn.Linear(4, 4), torch.bfloat16)
    with pytest.raises(ValueError, match=r"is selected for torch\.float8"):
        quantize_weights(nn.Embedding(4, 4))
    tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    with pytest.raises(TypeError, match=r"1.weight is tied to 0.weight"):
        quantize_weights(tied)
