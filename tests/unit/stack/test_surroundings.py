"""Default device and dtype, inference mode, autograd and autocast of the caller change no bit."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mp_optim import checkpoint, get_megatron_optimizer
from support.models import DTYPES, TinyMoE, config_for, same_bits

Surroundings = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Surroundings] = {
    "default-device": lambda: default_device("meta"),
    "device-context": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
STACKS: dict[str, dict[str, Any]] = {
    "overlap": {"precision": "fp16", "fraction": 0.7, "offload_mode": "overlap"},
    "reference": {"precision": "fp32", "fused_backend": "reference"},
    "torch": {"precision": "bf16", "fused_backend": "torch"},
    "compact": {"precision": "bf16-stochastic", "fraction": 0.5, "offload_mode": "speculative"},
    "muon": {"precision": "bf16", "optimizer": "muon", "muon_fp32_matmul_prec": "highest"},
}


PAIRS = list(itertools.product(SURROUNDINGS, STACKS))[::3]


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return sum(
        (
            param.float()
            * torch.randn(param.shape, generator=generator, device="cpu", dtype=torch.float32)
        ).sum()
        for param in model.parameters()
    )


def program(stack: dict[str, Any], folder: Any, around: Surroundings) -> list[Tensor]:
    """Build, train, save, load and train again, with every call inside ``around``. Return all
    tensors."""
    settings = dict(stack)
    precision, fraction = settings.pop("precision"), settings.pop("fraction", 0.0)
    seen: list[Tensor] = []

    def built() -> tuple[nn.Module, Any]:
        model = TinyMoE(DTYPES[precision.split("-")[0]])
        with around():
            optimizer = get_megatron_optimizer(config_for(precision, fraction, **settings), model)
            optimizer.state_dict()
        return model, optimizer

    def trained(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            with around():
                optimizer.zero_grad()
            loss = loss_of(model, step)
            with around():
                scaled = optimizer.scale_loss(loss) if step == 0 else None
            (
                optimizer.scale_loss(loss) if scaled is None or scaled.is_inference() else scaled
            ).backward()
            with around() if step != 2 else nullcontext():  # One step runs outside.
                result = optimizer.step()
            seen.append(
                torch.tensor(
                    [result.grad_norm, float(result.success)], dtype=torch.float64, device="cpu"
                )
            )

    model, optimizer = built()
    trained(model, optimizer, range(3))
    with around():
        checkpoint.save(folder, model, optimizer)
        state = optimizer.state_dict()
    other, resumed = built()
    with around():
        checkpoint.load(folder, other, resumed)
    trained(other, resumed, range(3, 5))
    with around():
        optimizer.load_state_dict(state)
    for chosen, chosen_model in ((optimizer, model), (resumed, other)):
        with around():
            seen += [main.detach().clone() for _, main in chosen.named_main_params()]
        seen += [value for slot in chosen.slots() for value in chosen.slot_state(slot).values()]
        seen += [param.detach() for param in chosen_model.parameters()]
    assert all(value.device.type == "cpu" for value in seen)
    return [value.clone() for value in seen]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return {
        name: program(stack, tmp_path_factory.mktemp("plain"), nullcontext)
        for name, stack in STACKS.items()
    }


@pytest.mark.parametrize(("around", "stack"), PAIRS)
def test_training_bits_do_not_depend_on_default_device_dtype_or_autocast(
    stack, around, undisturbed, tmp_path
):
    seen = program(STACKS[stack], tmp_path, SURROUNDINGS[around])
    assert len(seen) == len(undisturbed[stack])
    assert all(map(same_bits, seen, undisturbed[stack]))


@pytest.mark.parametrize("mode", ["sync", "overlap", "speculative"])
def test_step_uses_gradients_created_in_inference_mode(mode):
    results = []
    for surroundings in (nullcontext, torch.inference_mode):
        model = nn.Linear(6, 4).bfloat16()
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = get_megatron_optimizer(config_for("bf16", 1.0, offload_mode=mode), model)
        for scale in (1.0, 2.0, 3.0):
            optimizer.zero_grad()
            model(torch.ones(2, 6).bfloat16()).sum().backward()
            with surroundings():
                for param in model.parameters():
                    param.grad = param.grad * scale
            optimizer.step()
        results.append([param.detach() for param in model.parameters()])
    assert all(map(same_bits, *results))


def test_factory_names_a_param_created_in_inference_mode():
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"weight .*inference_mode"):
        get_megatron_optimizer(config_for("fp32"), model)
