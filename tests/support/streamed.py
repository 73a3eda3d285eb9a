"""A model with parameters of all kinds, and random storage formats of its state."""

import math

import torch
from hypothesis import strategies as st
from torch import nn

from mp_optim import OptimizerConfig, get_megatron_optimizer
from support.models import AdversarialTransfer
from support.offload import hybrids, snapshot

SHAPES = {"big": (3, 701), "left": (40, 20), "bias": (7,), "one": (1,), "right": (300,)}
LARGEST = 3 * 701 * 16 + 256
"""Upper bound of the bytes of the largest parameter in a window."""
FORMS = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "fp16": {"exp_avg_dtype": "float16", "exp_avg_sq_dtype": "float16"},
    "8-bit": {"exp_avg_dtype": "uint8", "exp_avg_sq_dtype": "uint8"},
    "4-bit": {"exp_avg_dtype": "uint4", "exp_avg_sq_dtype": "uint8"},
}
KEEPS = {
    "adam": ("exp_avg_dtype", "exp_avg_sq_dtype"),
    "lamb": ("exp_avg_dtype", "exp_avg_sq_dtype"),
    "sgd": ("exp_avg_dtype",),
    "lion": ("exp_avg_dtype",),
    "muon": ("exp_avg_dtype", "exp_avg_sq_dtype"),
}
WHOLE = ("lamb", "muon")
HALVES = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True, "loss_scale": 1.0}}


class Model(nn.Module):
    def __init__(self, dtype, shapes=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (shapes or SHAPES).items():
            value = torch.randn(shape, generator=generator).to(dtype)
            lies = value.t().contiguous().t() if name == "left" else value
            setattr(self, name, nn.Parameter(lies))


def give_gradients(model, step, bad=False):
    generator = torch.Generator().manual_seed(1 + step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    if bad:
        model.left.grad[1, 1] = math.nan


def build(
    folder=None,
    dtype=torch.bfloat16,
    fraction=1.0,
    place="streamed",
    window=4096,
    shapes=None,
    transfer=AdversarialTransfer,
    bucket_bytes=None,
    **fields,
):
    """Build an optimizer with state on the device, on the host, streamed, or in a file."""
    model = Model(dtype, shapes)
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    offload["optimizer_state_path"] = folder
    if place == "streamed":
        offload["offload_place"] = place
    if window is not None and (folder or place == "streamed"):
        offload["stream_window_bytes"] = window
    fields = {"lr": 1e-2, "weight_decay": 0.1, **HALVES.get(dtype, {}), **fields}
    config = OptimizerConfig(**fields, **(offload if place != "device" else {}))
    optimizer = get_megatron_optimizer(config, model)
    for hybrid in hybrids(optimizer) if transfer is not None else ():
        hybrid.stepper.use_transfer(transfer(), bucket_bytes)
    return model, optimizer


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(model, step)
        optimizer.step()
    return snapshot(model, optimizer)


@st.composite
def stepped(draw):
    rule = draw(st.sampled_from(list(KEEPS)))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    form = FORMS[draw(st.sampled_from(list(FORMS)))]
    form = {field: value for field, value in form.items() if field in KEEPS[rule]}
    bits = draw(st.sampled_from([None, 16, 8])) if dtype == torch.bfloat16 else None
    fields = {"dtype": dtype, "optimizer": rule, **form}
    if form or bits:
        fields["use_precision_aware_optimizer"] = True
        fields["store_param_remainders"] = bits is not None
    if bits == 8:
        fields["param_remainder_bits"] = 8
    if bits == 8 or form.get("exp_avg_dtype") in ("bfloat16", "uint8", "uint4"):
        fields["stochastic_rounding"] = draw(st.booleans())
    if rule == "muon":
        fields["muon_moment2_method"] = draw(st.sampled_from([None, "normuon"]))
    return fields | {"ema_decay": draw(st.sampled_from([None, 0.9]))}
