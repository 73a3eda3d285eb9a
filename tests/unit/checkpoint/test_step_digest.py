"""Digests of a step: equal for equal bits in every place, and different after one flipped bit."""

import random

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim.mixed_precision import Float16OptimizerWithFloat16Params
from support.launch import results_of_ranks
from support.places import PLACES, settings_of

SHAPES = {
    "embedding": (700, 96),
    "cube": (3, 5, 7),
    "bias": (9,),
    "long": (70_001,),
    "wide": (3, 70_001),
    "scalar": (),
}
FORMS = {
    "fp32": {},
    "8bit": {"state": "8bit"},
    "remainders": {"main_params": "remainder16", "state": "bf16"},
}


def trained(steps=2, **settings):
    generator = torch.Generator().manual_seed(3)
    model = nn.Module()
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator).bfloat16()
        setattr(model, name, nn.Parameter(value.float() if name == "cube" else value))
    optimizer = mp_optim.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0, **settings)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
        optimizer.step_digest(sample=2)
    return model, optimizer


@pytest.mark.parametrize("form", FORMS)
def test_step_digest_is_equal_for_every_offload_place(form, tmp_path):
    digests = {}
    for place in PLACES:
        _, optimizer = trained(**FORMS[form], **settings_of(place, tmp_path))
        found = optimizer.step_digest(sample=1, per_tensor=True)
        assert found.grad_norm == optimizer.last_step.grad_norm
        digests[place] = found, optimizer.step_digest(sample=5), dict(found.per_tensor)
    assert all(each == digests["device"] for each in digests.values()), digests


@pytest.mark.parametrize("form", FORMS)
def test_step_digest_with_sample_n_reads_every_element_once_in_n_steps(form):
    _, optimizer = trained(**FORMS[form])
    whole = optimizer.step_digest(sample=1)
    for sample in (2, 7):
        parts = [optimizer.step_digest(sample, step=step) for step in range(3, 3 + sample)]
        assert (sum(part.value for part in parts) - whole.value) % 2**64 == 0
        assert sum(part.bytes_read for part in parts) == whole.bytes_read


@pytest.mark.parametrize("form", FORMS)
def test_step_digest_with_sample_n_finds_any_flipped_bit_within_n_steps(form):
    model, optimizer = trained(**FORMS[form])
    chance, sample = random.Random(form), 5
    before = optimizer.step_digest(sample=1, per_tensor=True)
    parts = [optimizer.step_digest(sample, step=step) for step in range(sample)]
    for _ in range(25):
        name = chance.choice([*SHAPES])
        live = optimizer.state_of(optimizer.slots()[[*SHAPES].index(name)]).live()
        tensors = {"param": getattr(model, name).data, **live}
        key = chance.choice(sorted(tensors))
        flat = tensors[key].view(-1).view(torch.uint8)
        at, bit = chance.randrange(len(flat)), 1 << chance.randrange(8)
        flat[at] ^= bit
        after = optimizer.step_digest(sample=1, per_tensor=True)
        pairs = zip(before.per_tensor.items(), after.per_tensor.values(), strict=True)
        named = [entry for (entry, value), now in pairs if value != now]
        equal = [part == optimizer.step_digest(sample, step=part.step) for part in parts]
        flat[at] ^= bit
        assert after != before and named, (name, key, at, bit)
        assert all(entry.endswith(f".{name}") for entry in named)
        assert equal.count(False) == 1
    assert optimizer.step_digest(sample=1) == before


def test_step_digest_is_equal_for_every_process_group_after_digests_of_other_groups(tmp_path):
    ranks = results_of_ranks("digests", 3, tmp_path, timeout=120)
    found = [value for rank in ranks for value in rank["values"].values()]
    assert len(found) == 13 and len(set(found)) == 1, ranks
    assert all(rank["bytes"] for rank in ranks)


def of_torch():
    """Return two parameters and an AdamW of torch.optim in a wrapper. The wrapped optimizer
    allocates the state of a parameter at the parameter's first gradient."""
    params = [nn.Parameter(torch.full((300,), value).bfloat16()) for value in (1.0, 2.0)]
    config = mp_optim.OptimizerConfig(lr=0.1, bf16=True, clip_grad=0.0)
    optimizer = torch.optim.AdamW(params, lr=0.1)
    return params, Float16OptimizerWithFloat16Params(optimizer, config)


def tensors_of(optimizer):
    state = optimizer.state_dict()["state"].values()
    return len(optimizer.step_digest(sample=1, per_tensor=True).per_tensor), sum(map(len, state))


def test_step_digest_reads_torch_optims_state_when_it_is_allocated_after_a_digest():
    params, optimizer = of_torch()
    assert tensors_of(optimizer) == (2 + 2, 2)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert tensors_of(optimizer) == (2 + 5, 5)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert tensors_of(optimizer) == (2 + 8, 8)


def test_step_digest_reads_torch_optims_state_when_a_load_follows_a_digest():
    params, trained_one = of_torch()
    for param in params:
        param.grad = torch.ones_like(param)
    trained_one.step()
    loaded, optimizer = of_torch()
    optimizer.step_digest(sample=1)
    for param, source in zip(loaded, params, strict=True):
        param.data.copy_(source)
    optimizer.load_state_dict(trained_one.state_dict())
    expected = trained_one.step_digest(sample=1)
    assert optimizer.step_digest(sample=1, step=1) == expected


@pytest.mark.parametrize(
    ("name", "value"), [("sample", 0), ("sample", 2.5), ("step", -1), ("step", 2.5), ("step", "3")]
)
def test_step_digest_refuses_a_sample_or_step_that_is_not_a_whole_number(name, value):
    _, optimizer = trained(steps=1)
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        optimizer.step_digest(**{name: value})


@pytest.mark.parametrize("form", [float, torch.tensor])
def test_step_digest_takes_sample_and_step_as_a_tensor_or_whole_float(form):
    _, optimizer = trained(steps=1)
    found = optimizer.step_digest(sample=form(2), step=form(3))
    assert found == optimizer.step_digest(sample=2, step=3) and found.bytes_read
    assert optimizer.step_digest(sample=1, step=form(3)).bytes_read > found.bytes_read
