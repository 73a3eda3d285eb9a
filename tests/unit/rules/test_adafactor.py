"""Adafactor: against torch's, against the paper's formulas in FP64, its state, and what is
refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.core import Slot, SlotUpdate
from mp_optim.kernels.native_library import native_library, set_host_threads
from mp_optim.rules.adafactor import FusedAdafactor
from mp_optim.rules.elementwise import FusedAdam
from support.models import same_bits

SHAPES = [(64, 128), (300, 7), (1, 5), (5, 1), (4, 3, 6), (3, 2, 3, 3), (9,), (), (0, 4)]
SETTINGS = [
    {},
    {"lr": 0.1, "weight_decay": 0.1},
    {"eps": (1e-3, 1e-2), "d": 2.0, "beta2_decay": -0.5},
    {"lr": 1e-4, "eps": (None, 0.0)},
]


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(rule, shape, grads, **settings):
    param = nn.Parameter(random(shape))
    optimizer = rule([param], **settings)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch has no Adafactor yet")
def test_it_is_torchs_adafactor(shape, settings):
    """Within an ulp of the parameter a step; state within rounding, under torch's keys and in its
    shapes."""
    grads = [random(shape, 1 + step) * 2.0 ** -(step % 7) for step in range(20)]
    ours, state = stepped(FusedAdafactor, shape, grads, **settings)
    theirs, torchs = stepped(torch.optim.Adafactor, shape, grads, **settings)
    top = float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) <= 20 * 2.0**-23 * max(top, 1.0)
    assert state.keys() == torchs.keys()
    for key, value in torchs.items():
        torch.testing.assert_close(state[key], value, rtol=4e-6, atol=0)


def paper(param, grads, lr=1e-2, decay=-0.8, eps1=2.0**-23, eps2=1e-3, d=1.0):
    """Algorithms 4 and 5 of the paper in FP64, with torch's reading of eps1 and relative step."""
    rows = columns = None
    for step, grad in enumerate(grads, 1):
        weight = step**decay
        by_row, by_column = (grad**2).mean(1), (grad**2).mean(0)
        rows = by_row if rows is None else (1 - weight) * rows + weight * by_row
        columns = by_column if columns is None else (1 - weight) * columns + weight * by_column
        second = np.outer(rows, columns) / max(rows.mean(), eps1)
        direction = grad / np.sqrt(np.maximum(second, eps1**2))
        direction /= max(1.0, np.sqrt((direction**2).mean()) / d)
        scale = max(eps2, np.sqrt((param**2).mean())) * min(lr, step**-0.5)
        param = param - scale * direction
    return param


def test_it_is_the_papers():
    grads = [random((40, 30), 1 + step) for step in range(50)]
    ours, _ = stepped(FusedAdafactor, (40, 30), grads)
    expected = paper(random((40, 30)).double().numpy(), [grad.double().numpy() for grad in grads])
    assert np.abs(ours.double().numpy() - expected).max() <= 1e-3 * 1e-2


def exact(x, axis=None):
    """docs/numerics.md, "Exact sums", in numpy: FP64."""
    top = float(np.abs(x).max())
    exponent = np.frexp(top)[1]
    y = (x.astype(np.float64) * 2.0**-exponent) ** 2 * 2.0**31
    high = np.floor(y)
    low = np.floor((y - high) * 2.0**31)
    high, low = (digits.astype(np.int64).sum(axis) for digits in (high, low))
    return (high * 2.0**31 + low) * 2.0 ** (2 * exponent - 62)


def pairs(x):
    """The sum of the elements in adjacent pairs, zero filled, in FP64."""
    x = np.pad(x.astype(np.float64), (0, (1 << (len(x) - 1).bit_length()) - len(x)))
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def rms(x):
    return math.sqrt(float(exact(x)) / x.size)


def documented(p, grads, lr=1e-2, weight_decay=0.1):
    """docs/numerics.md, "Adafactor", in numpy FP32, for a matrix."""
    F = np.float32
    eps1 = 2.0**-23
    rows, columns = p.shape
    R, C = np.zeros(rows, F), np.zeros(columns, F)
    for step, g in enumerate(grads, 1):
        w, keep = F(step**-0.8), F(1 - step**-0.8)
        R = R * keep + (exact(g, 1) / columns).astype(F) * w
        C = C * keep + (exact(g, 0) / rows).astype(F) * w
        v = (R / max(F(pairs(R) / rows), F(eps1)))[:, None] * C
        u = g / np.sqrt(np.maximum(v, F(eps1 * eps1)).astype(np.float64)).astype(F)
        s = max(1e-3, rms(p)) * min(lr, 1 / math.sqrt(step)) / max(1.0, rms(u))
        p = p - p * F(lr * weight_decay)
        p = p - u * F(s)
    return p


@pytest.mark.parametrize("shape", [(64, 128), (37, 5), (1, 9), (9, 1)], ids=str)
def test_it_is_what_the_page_of_numerics_says_to_the_bit(shape):
    grads = [random(shape, 1 + step) * 2.0 ** -(9 * step % 20) for step in range(5)]
    ours, _ = stepped(FusedAdafactor, shape, grads, weight_decay=0.1)
    expected = documented(random(shape).numpy(), [grad.numpy() for grad in grads])
    assert same_bits(ours, torch.from_numpy(expected))


def test_a_tensor_without_elements_is_stepped():
    param, state = stepped(FusedAdafactor, (0, 4), [torch.zeros(0, 4)])
    assert param.shape == (0, 4) and state["row_var"].shape == (0, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_spoils_its_parameter(bad):
    grad = random((4, 5))
    grad[1, 2] = bad
    assert stepped(FusedAdafactor, (4, 5), [grad])[0].isnan().all()


def test_large_matrices_keep_less_than_one_state():
    _, state = stepped(FusedAdafactor, (64, 128), [random((64, 128))])
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (),
        "row_var": (64, 1),
        "col_var": (1, 128),
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"beta2_decay": 0.5}, "beta2_decay=0.5: must be a number <= 0"),
        ({"d": 0.5}, "d=0.5: must be a finite number >= 1"),
        ({"eps": 1e-8}, "eps=1e-08: must be two numbers"),
        ({"eps": (-1.0, 1e-3)}, "eps.*=-1.0: must be a finite number >= 0"),
        ({"eps": (None, None)}, "eps.*=None: must be a finite number >= 0"),
        ({"exp_avg_dtype": torch.bfloat16}, "exp_avg_dtype=torch.bfloat16: adafactor keeps"),
        ({"exp_avg_sq_dtype": torch.uint8}, "exp_avg_sq_dtype=torch.uint8: adafactor keeps"),
    ],
)
def test_settings_are_checked(settings, said):
    with pytest.raises(ValueError, match=said):
        FusedAdafactor([nn.Parameter(torch.ones(2, 2))], **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adafactor_eps2": -1.0}, "adafactor_eps2=-1.0: must be a finite number >= 0"),
        ({"adafactor_beta2_decay": 0.1}, "adafactor_beta2_decay=0.1: must be a finite number <= 0"),
        ({"adafactor_clip_threshold": 0.5}, "adafactor_clip_threshold=0.5: must be"),
        ({"adam_beta1": 0.5}, "adam_beta1=0.5: has no effect with optimizer='adafactor'"),
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "uint8"},
            "exp_avg_dtype=torch.uint8: adafactor keeps its state in torch.float32",
        ),
        (
            {"fused_backend": "apex"},
            "fused_backend='apex': has no kernels for optimizer='adafactor'",
        ),
    ],
)
def test_configs_are_checked(settings, said):
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(optimizer="adafactor", lr=1e-2, **settings)
    with pytest.raises(ValueError, match=r"adafactor_eps1=0\.1: has no effect with"):
        OptimizerConfig(optimizer="adam", lr=1e-2, adafactor_eps1=0.1)


def test_the_config_reaches_the_rule():
    config = OptimizerConfig(
        optimizer="adafactor",
        lr=1e-2,
        adafactor_eps1=1e-4,
        adafactor_clip_threshold=2.0,
        adafactor_beta2_decay=-0.7,
    )
    group = get_megatron_optimizer(config, nn.Linear(3, 4)).param_groups[0]
    assert group["eps"] == (1e-4, 1e-3) and group["d"] == 2.0 and group["beta2_decay"] == -0.7


def test_another_rules_state_is_refused():
    param = nn.Parameter(torch.ones(3, 4))
    param.grad = torch.ones(3, 4)
    adam, ours = FusedAdam([param]), FusedAdafactor([param])
    with pytest.raises(ValueError, match=r"missing \['col_var', 'row_var'\], unknown \['exp_avg'"):
        ours.load_state_dict({**ours.state_dict(), "state": adam.state_dict()["state"]})
    saved = ours.state_dict()
    saved["state"][0]["row_var"] = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"row_var: saved shape \(1, 3\), expected \(3, 1\)"):
        ours.load_state_dict(saved)


def test_torchs_state_dict_is_loaded_and_ours_by_torch():
    grads = [random((4, 5), 1 + step) for step in range(3)]
    param = nn.Parameter(random((4, 5)))
    torchs = torch.optim.Adafactor([param])
    for grad in grads:
        param.grad = grad
        torchs.step()
    ours = FusedAdafactor([param])
    ours.load_state_dict(torchs.state_dict())
    assert float(ours.state[param]["step"]) == 3
    assert torch.equal(ours.state[param]["row_var"], torchs.state[param]["row_var"])
    torchs.load_state_dict(ours.state_dict())


LIBRARY = native_library()
ODD = [0.0, -0.0, 1e-45, -1e-40, 1e-33, 65504.0, 1.0 + 2.0**-23]


def needs_kernels(test):
    reason = f"no native kernels: {LIBRARY.why}"
    return pytest.mark.native(pytest.mark.skipif(LIBRARY.handle is None, reason=reason)(test))


@pytest.fixture(params=LIBRARY.levels or [""])
def level(request):
    """Each instruction-set level that this CPU has."""
    before = LIBRARY.level
    LIBRARY.set_level(request.param)
    yield request.param
    LIBRARY.set_level(before)
    set_host_threads(None)


def spread(shape, seed, *odd):
    """Values over many magnitudes, with odd ones among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-60, 40, shape, generator=generator)
    values = torch.randn(shape, generator=generator) * torch.exp2(exponents.float())
    chosen = torch.tensor([*ODD, *odd])[torch.randint(0, 7 + len(odd), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.1, chosen, values)


def assert_same(ours, theirs):
    """Equal bits; all NaNs count as equal, as IEEE does not say which one an operation makes."""
    ours, theirs = ours.float(), theirs.float()
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    assert bool(same.all()), f"{ours[~same][:4].tolist()} instead of {theirs[~same][:4].tolist()}"


def assert_native_is_reference(shapes, grads, cut=torch.clone, main=None, **settings):
    """Three steps of both, with outputs in bfloat16.

    Args:
        grads: makes the gradient of a shape and a seed. cut: makes the tensor to step of values.
        main: values of a parameter, instead of random ones.
    """
    found = []
    for backend in ("native", "reference"):
        mains = [cut(spread(shape, 1) if main is None else main) for shape in shapes]
        outputs = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
        optimizer = FusedAdafactor(mains, backend=backend, **settings)
        for step in range(3):
            optimizer.step_slots(
                [
                    SlotUpdate(Slot(0, at), grads(shape, 10 + step), 0.37 if step else 1.0, out)
                    for at, (shape, out) in enumerate(zip(shapes, outputs, strict=True))
                ]
            )
        states = [list(optimizer.state[each].values()) for each in mains]
        found.append([*mains, *outputs, *itertools.chain(*states)])
    for ours, theirs in zip(*found, strict=True):
        assert_same(ours, theirs)


ALL_SHAPES = [
    *SHAPES,
    (1, 5000),
    (5000, 1),
    (33, 1025),
    (2049, 3),
    (257, 1024),
    (70_001,),
    (3, 129, 130),
    (3, 2, 40, 33),
    (0,),
    (4, 0),
    (0, 3, 4),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    zip([torch.float32, torch.bfloat16, torch.float16, torch.float64], SETTINGS, strict=True),
    ids=str,
)
@needs_kernels
def test_native_kernels_have_the_references_bits(level, threads, dtype, settings):
    set_host_threads(threads)
    assert_native_is_reference(
        ALL_SHAPES, lambda shape, seed: spread(shape, seed).to(dtype), **settings
    )


@pytest.mark.parametrize(
    "odd", [(math.inf,), (-math.inf,), (math.nan,), (3e38, -3e38), (2.0**-149,), (1e20, 1e-30)]
)
@needs_kernels
def test_native_kernels_have_the_references_bits_for_odd_values(level, odd):
    """In gradients, then in parameters; then of nothing but them; then of zeros."""
    shapes = [(40, 33), (1, 9), (70,), (2, 3, 5)]
    assert_native_is_reference(shapes, lambda shape, seed: spread(shape, seed, *odd))
    assert_native_is_reference([(20, 70)], spread, main=spread((20, 70), 3, *odd))
    assert_native_is_reference(shapes, lambda shape, seed: torch.full(shape, odd[0]))
    assert_native_is_reference(shapes, lambda shape, seed: torch.zeros(shape))
    assert_native_is_reference(shapes, lambda shape, seed: torch.zeros(shape), eps=(0.0, 0.0))


@needs_kernels
def test_native_kernels_step_tensors_that_are_not_contiguous(level):
    def every_second(values):
        return values.repeat_interleave(2, -1)[..., ::2]

    def transposed(shape, seed):
        return spread(shape, seed).mT.contiguous().mT

    assert not every_second(random((40, 33))).is_contiguous()
    assert_native_is_reference([(40, 33), (3, 40, 33)], transposed, every_second)


@pytest.mark.parametrize("bits", [8, 16])
@needs_kernels
def test_native_kernels_step_remainders(level, bits):
    assert_native_is_reference(
        [(40, 33), (70,)],
        spread,
        torch.Tensor.bfloat16,
        store_param_remainders=True,
        param_remainder_bits=bits,
    )


@needs_kernels
def test_native_kernels_step_large_tensors_on_any_number_of_threads(level):
    grads = {seed: spread((300, 1300), seed) for seed in (10, 11, 12)}
    for threads in (2, 5):
        set_host_threads(threads)
        assert_native_is_reference([(300, 1300), (390_000,)], lambda s, n: grads[n].view(s))


@needs_kernels
def test_native_kernels_are_shown_and_tell_autograd():
    param = nn.Parameter(random((40, 33)))
    for backend in ("auto", "native"):
        optimizer = FusedAdafactor([param], backend=backend)
        assert optimizer.executor.carried_out_by(0, "device", torch.device("cpu"))[0] == "native"
        version, param.grad = param._version, random((40, 33), 1)
        optimizer.step()
        assert param._version > version
    config = OptimizerConfig(optimizer="adafactor", lr=1e-2, fused_backend="native")
    assert "native" in str(get_megatron_optimizer(config, nn.Linear(3, 4)).describe())
    config = OptimizerConfig(optimizer="adafactor", lr=1e-2, fused_backend="reference")
    assert "adafactor: torch op" in str(get_megatron_optimizer(config, nn.Linear(3, 4)).describe())
