"""Programs written for ``torch.optim`` run with the optimizer classes and give equal results."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import math
import re
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.overrides import TorchFunctionMode

import mp_optim
from mp_optim.optimizers.base import AmpLossScale

# One or two FP32 operations in another order differ by an ulp of |p| < 2 (1.2e-7). The differences
# add up like a random walk; measured 1e-6 at most.
TOLERANCE = 5e-6


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 3)).to(dtype)


def losses(
    layers: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 50, first: int = 0
) -> list[float]:
    result = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 8, generator=generator).to(next(layers.parameters()).dtype)
        optimizer.zero_grad()
        loss = (layers(x).float() - x[:, :3].float()).square().mean()
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def test_optimizer_classes_do_not_clip_by_default() -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for param in params:
        param.grad = torch.full((4,), 50.0)
    free = mp_optim.SGD(params[:1], lr=1.0)
    free.step()
    limited = mp_optim.SGD(params[1:], lr=1.0, max_grad_norm=1.0)
    limited.step()
    assert params[0].norm() == 100.0 and float(params[1].norm()) == pytest.approx(1.0, 1e-5)
    assert free.last_step.grad_norm == limited.last_step.grad_norm == 100.0


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda n: 1 / (n + 1)] * 2),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 7]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, 3, cycle_momentum=True),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, 12),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 3), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.ExponentialLR(o, 0.9)], [4]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize(("name", "rule"), zip(SCHEDULES, cycle(["AdamW", "SGD"])))
def test_torch_schedulers_drive_our_classes_like_torch_classes(name: str, rule: str) -> None:
    settings = {"momentum": 0.9} if rule == "SGD" else {}
    seen: list[list[Any]] = []
    for library in (mp_optim, torch.optim):
        layers = model()
        halves = [{"params": list(layers[index].parameters())} for index in (0, 2)]
        optimizer = getattr(library, rule)(halves, lr=1e-2, **settings)
        scheduler, rates = SCHEDULES[name](optimizer), []
        for step in range(11):
            losses(layers, optimizer, 1, step)
            kept = [(g["lr"], g.get("betas", g.get("momentum"))) for g in optimizer.param_groups]
            rates.append(kept)
            plateau = (1.0,) if name == "ReduceLROnPlateau" else ()
            scheduler.step(*plateau)
        seen.append(rates)
        seen.append([param.detach().clone() for param in layers.parameters()])
    rates, params, rates_of_torch, params_of_torch = seen
    assert rates == rates_of_torch
    for ours, theirs in zip(params, params_of_torch, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.0, atol=TOLERANCE)


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("form", ["fp32", "remainder16", "remainder8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_load_names_the_dtype_when_params_were_widened_after_a_save(
    dtype: torch.dtype, form: str
) -> None:
    layers = model(dtype)
    optimizer = mp_optim.AdamW(layers.parameters(), lr=1e-2, main_params=form)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "float16 parameters are stepped without")
        losses(layers, optimizer, 2)
    widened = copy.deepcopy(layers).float()
    before = copy.deepcopy(widened.state_dict())
    resumed = mp_optim.AdamW(widened.parameters(), lr=1e-2, main_params=form)
    with pytest.raises(ValueError, match=r"was .*16.* when it was saved.* is float32 now"):
        resumed.load_state_dict(optimizer.state_dict())
    assert all(map(torch.equal, widened.state_dict().values(), before.values()))


@pytest.mark.parametrize("mode", ["overlap", "speculative"])
def test_adamw_releases_gradients_from_the_first_backward_with_equal_bits(mode: str) -> None:
    found = []
    for release in (False, True):
        layers = model(torch.bfloat16)
        optimizer = mp_optim.AdamW(
            layers.parameters(),
            lr=1e-2,
            offload=1.0,
            offload_mode=mode,
            max_grad_norm=0.1,
            release_gradients=release,
        )
        layers(torch.ones(4, 8, dtype=torch.bfloat16)).float().sum().backward()
        held = [param for param in layers.parameters() if param.grad is not None]
        assert len(held) == (0 if release else 6)
        optimizer.step()
        found.append((losses(layers, optimizer, 5), optimizer.last_step.grad_norm))
    assert found[0] == found[1]


def test_adamw_warns_once_when_fp16_params_have_no_loss_scale() -> None:
    param = nn.Parameter(torch.zeros(4).half())
    optimizer = mp_optim.AdamW([param])
    param.grad = torch.ones(4).half()
    with pytest.warns(UserWarning, match=r"without a loss scale.*GradScaler"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_skips_step_calls_when_a_gradient_is_infinite(dtype: torch.dtype) -> None:
    """accelerate replaces ``step`` and counts a call as a step; schedulers follow that count."""
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = mp_optim.AdamW([param], lr=1e-2)
    schedule = schedulers.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    calls: list[int] = []
    before = optimizer.step

    def patched() -> None:
        calls.append(step)
        before()

    for step in range(4):
        scaler.scale(torch.zeros(()))
        param.grad = torch.full_like(param, math.inf if step in (0, 2) else 2.0)
        optimizer.step = patched  # accelerate replaces ``step`` in this way around each step.
        scaler.step(optimizer)
        assert vars(optimizer)["step"] is patched
        scaler.update()
        optimizer.step = before
        if step in calls:
            schedule.step()
        elif dtype == torch.float16:
            assert not optimizer.last_step.success
        optimizer.zero_grad()
    assert calls == [1, 3] and optimizer.param_groups[0]["lr"] == 2.5e-3
    assert scaler.get_scale() == 256.0 and not hasattr(optimizer, "grad_scale")


def test_deepcopy_binds_a_copied_scheduler_to_the_copied_optimizer() -> None:
    optimizer = mp_optim.AdamW(model().parameters(), lr=1e-2)
    its_own, schedule = copy.deepcopy((optimizer, schedulers.StepLR(optimizer, 3)))
    assert schedule.optimizer is its_own
    its_own.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 1e-2


# torch's Muon has no AdamW, and its eps is a constant of Newton-Schulz.
NOT_THE_SAME = {("Muon", "eps")}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adafactor", "Muon"])
def test_class_defaults_equal_torch_defaults_for_shared_arguments(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    ours, theirs = (
        inspect.signature(getattr(library, name)).parameters for library in (mp_optim, torch.optim)
    )
    shared = [key for key in ours if key in theirs and (name, key) not in NOT_THE_SAME]
    assert len(shared) > 4
    found, expected = ({key: of[key].default for key in shared} for of in (ours, theirs))
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"state": "2bit"}, "state='2bit': must be one of"),
        ({"state": "int8"}, "state='int8': must be one of .* did you mean '8bit'"),
        ({"offload": 50}, "offload=50: .*give 0.5 for 50 %"),
        ({"main_params": "fp16"}, "main_params='fp16': must be one of"),
        ({"offload_mode": "overlap"}, "='overlap': has no effect without offload > 0; set both"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0: must be a finite number > 0"),
        ({"stochastic_rounding": "False", "state": "bf16"}, "stochastic_rounding='False': must be"),
        ({"betas": "0.9,0.95"}, "betas='0.9,0.95': must be two numbers"),
        ({"lr": "1e-3"}, "lr='1e-3': must be a finite number"),
        ({"release_gradients": True}, "release_gradients=True: .*offload"),
        ({"amsgrad": True}, "amsgrad=True: AMSGrad is not supported"),
    ],
)
def test_adamw_refuses_invalid_argument_values_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mp_optim.AdamW([nn.Parameter(torch.zeros(2))], **settings)


def test_adamw_accepts_numbers_written_as_text() -> None:
    """Programs pass text from a command line or a YAML file."""
    text = {"offload": "1.0", "max_grad_norm": "0.5", "ema_decay": "0.99", "min_8bit_size": "64"}
    optimizer = mp_optim.AdamW([nn.Parameter(torch.zeros(2))], state="8bit", **text)
    config = optimizer.config
    assert (config.optimizer_offload_fraction, config.clip_grad) == (1.0, 0.5)
    assert (config.ema_decay, config.fp32_state_below) == (0.99, 64)


OF_OTHERS = {
    "optim_bits": "state='8bit'",
    "percentile_clipping": "max_grad_norm",
    "gpu_memory": "offload='auto'",
    "clip_grad_norm": "max_grad_norm",
    "exp_avg_dtype": "use state",
    "kahan_sum": "main_params='remainder16'",
    "adam_epsilon": "use eps",
    "momentum": "no such setting",
    "init_scale": "of OptimizerConfig",
    "total_steps": "schedule",
}
CONFIG_FIELDS = [field.name for field in dataclasses.fields(mp_optim.OptimizerConfig)]
OF_THE_CLASSES = {*inspect.signature(mp_optim.AdamW).parameters}


@pytest.mark.parametrize("name", [*OF_OTHERS, *sorted({*CONFIG_FIELDS} - OF_THE_CLASSES)])
def test_adamw_names_our_argument_when_given_an_argument_of_another_library(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected argument '{name}'") as caught:
        mp_optim.AdamW([nn.Parameter(torch.zeros(2))], **{name: 8})
    said = str(caught.value).partition(f"'{name}'")[2]
    assert OF_OTHERS.get(name, "") in said and said
    # ``optimizer`` is also a plain English word.
    fields = {*CONFIG_FIELDS} - OF_THE_CLASSES - {"optimizer"}
    others = {*re.findall(r"\w+", said)} & fields
    assert not others or "of OptimizerConfig" in said


def test_amp_loss_scale_creates_no_tensor_on_the_device() -> None:
    """Every step reads the loss scale, and a copy of a number to the device would synchronize."""

    places: list[str] = []

    class Places(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.tensor:
                places.append(str((kwargs or {}).get("device")))
            return func(*args, **(kwargs or {}))

    scale = torch.ones((), device="meta")
    with Places():
        assert AmpLossScale(scale).scale.device.type == "meta"
    assert "meta" not in places
