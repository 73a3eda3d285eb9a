"""Codes of published weights: their arithmetic, their size, and receivers with the same bits."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import WeightDelta, apply_delta
from mp_optim.apps.deltas import DeltaQuantizer, quantized_weights
from mp_optim.core.weight_delta import bits_differ

FORMS = ["fp8_block", "fp8_row", "nvfp4"]
NAMES = "*_proj.weight"


def bits_equal(one, other):
    return [*one] == [*other] and all(
        one[name].shape == other[name].shape
        and one[name].dtype == other[name].dtype
        and not bits_differ(one[name], other[name]).numel()
        for name in one
    )


# -- arithmetic -----------------------------------------------------------------------------------

FLOAT8 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
FLOAT4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
RAGGED = {"fp8_block": (2600, 1000), "fp8_row": (2600, 1000), "nvfp4": (2560, 1024)}


def nearest(values, table):
    """Return the index of the nearest value of a table: the even index in a tie."""
    values = np.minimum(values.astype(np.float64), table[-1])
    above = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    low, high = values - table[above - 1], table[above] - values
    down = (low < high) | ((low == high) & (above % 2 == 1))
    return (above - down).astype(np.uint8)


def float8_of(values):
    return nearest(np.abs(values), FLOAT8) + np.uint8(128) * np.signbit(values)


def published_formula(weight, form):
    """Return codes and scales by the formulas of the checkpoint formats, in numpy's FP32."""
    values = weight.float().numpy()
    rows, columns = values.shape
    if form == "nvfp4":
        second = np.abs(values).max() / np.float32(448 * 6)
        blocks = values.reshape(rows, -1, 16)
        block = np.abs(blocks).max(2) / np.float32(6) / second
        scale = float8_of(np.clip(block, np.float32(2**-6), np.float32(448)))
        factor = np.float32(1) / second / FLOAT8[scale]
        scaled = (blocks * factor[..., None]).reshape(rows, columns)
        codes = nearest(np.abs(scaled), FLOAT4) | np.uint8(8) * np.signbit(scaled)
        return [codes[:, ::2] | codes[:, 1::2] << 4, scale, second]
    height, width = (128, 128) if form == "fp8_block" else (1, columns)
    padded = np.pad(values, ((0, -rows % height), (0, -columns % width)))
    grid = padded.reshape(-(-rows // height), height, -(-columns // width), width)
    scale = np.abs(grid).max((1, 3)) / np.float32(448)
    codes = float8_of(grid / scale[:, None, :, None]).reshape(padded.shape)
    return [codes[:rows, :columns], scale]


def spread_weights(shape, size, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * size
    weight *= torch.exp2(torch.randint(-12, 1, shape, generator=generator).float())
    return weight.bfloat16()


@pytest.mark.parametrize(
    "sizes", [[0.02, 1e-8], pytest.param([0.02, 1e-3, 30.0, 1e-8], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_have_the_codes_of_the_formula_for_millions_of_values(form, sizes):
    count = 0
    for seed, size in enumerate(sizes):
        weight = spread_weights(RAGGED[form], size, seed)
        found = quantized_weights({"a.up_proj.weight": weight}, form, NAMES)
        for each, expected in zip(found.values(), published_formula(weight, form), strict=True):
            is_scale = each.dtype == torch.float32
            bits = each.numpy() if is_scale else each.view(torch.uint8).numpy()
            np.testing.assert_array_equal(bits, expected)
        count += weight.numel()
    assert count > 2_500_000 * len(sizes)


def test_quantized_weights_have_the_codes_of_torchao_for_fp8_and_nvfp4():
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = spread_weights((1280, 1024), 0.02, 0)
    for form, block in (("fp8_block", [128, 128]), ("fp8_row", [1, 1024])):
        codes, scale = quantized_weights({"q_proj.weight": weight}, form, NAMES).values()
        expected = primitives._choose_scale_float8(weight.float(), block)
        assert torch.equal(scale, expected)
        expected = primitives._quantize_affine_float8(weight.float(), expected)
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    codes, scale, second = quantized_weights({"q_proj.weight": weight}, "nvfp4", NAMES).values()
    assert torch.equal(second, nvfp4.per_tensor_amax_to_scale(weight.abs().amax()))
    blocks, expected = nvfp4.nvfp4_quantize(weight, 16, second)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), blocks.view(torch.uint8).view(scale.shape))


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_store_zeros_as_zero_codes_with_positive_scales(form):
    found = quantized_weights({"q_proj.weight": torch.zeros(4, 32).bfloat16()}, form, NAMES)
    codes, *scales = found.values()
    assert not codes.view(torch.uint8).any()
    assert all(bool((scale.float() > 0).all()) for scale in scales)


# -- publications ---------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 32)
        self.q_proj, self.k_proj = nn.Linear(32, 144), nn.Linear(32, 144)
        self.o_proj = nn.Linear(144, 160)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.o_proj(torch.tanh(self.q_proj(hidden)) * self.k_proj(hidden)).float()


def fp16_trainer():
    model = Model().half()
    config = mp_optim.OptimizerConfig(
        lr=1e-3, fp16=True, initial_loss_scale=2.0**28, loss_scale_window=16
    )
    return model, mp_optim.get_megatron_optimizer(config, model)


def train_step(model, optimizer, step):
    tokens = torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    optimizer.scale_loss(model(tokens).square().mean()).backward()
    return optimizer.step().success


@pytest.mark.parametrize("steps", [200, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_delta_quantizer_keeps_a_receiver_equal_after_skipped_steps_and_a_resume(form, steps):
    model, optimizer = fp16_trainer()
    optimizer.track_changes()
    quantizer, saved, skipped = DeltaQuantizer(form, NAMES), None, 0
    replica, after, is_full = quantized_weights(model, form, NAMES), None, True
    for step in range(steps):
        skipped += not train_step(model, optimizer, step)
        if step == 40:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 80:  # The trainer resumes in other objects, from step 40.
            model, optimizer = fp16_trainer()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            optimizer.track_changes()
            is_full = True
        if step == 120:  # The reader loses its weights.
            replica = {name: torch.empty_like(tensor) for name, tensor in replica.items()}
            is_full = True
        if step == 160:
            with torch.no_grad():
                model.k_proj.weight[3, 5] = 9.0
        delta = quantizer.quantize(optimizer.changed_weights(full=is_full), model)
        after = apply_delta(replica, WeightDelta.from_bytes(delta.to_bytes()), after)
        if step % 4 == 3 or is_full:  # A missed code stays wrong, so that a later step shows it.
            assert bits_equal(replica, quantized_weights(model, form, NAMES)), step
        is_full = False
    assert skipped > 2


@pytest.mark.parametrize(
    ("form", "codes", "all_codes"),
    [("fp8_block", 1, 128 * 32), ("fp8_row", 1, 32), ("nvfp4", 1, 8)],
)
def test_delta_quantizer_sends_a_whole_block_only_when_its_scale_changes(form, codes, all_codes):
    model = Model().bfloat16()
    with torch.no_grad():
        model.o_proj.weight[0, 0] = 1.0
        model.q_proj.weight[0, 0] = 2.0
    optimizer = mp_optim.AdamW(model.named_parameters(), lr=1e-3)
    optimizer.track_changes()
    quantizer = DeltaQuantizer(form, NAMES)
    quantizer.quantize(optimizer.changed_weights(full=True), model)

    def sent(row, column, value):
        """Change one element, and quantize a delta that lists only that element."""
        with torch.no_grad():
            model.q_proj.weight[row, column] = value
        changed = optimizer.changed_weights()
        (patch,) = changed.patches
        at = torch.tensor([row * 32 + column])
        alone = patch._replace(values=patch.values[at], indices=at)
        patches = quantizer.quantize(replace(changed, patches=(alone,)), model).patches
        return {patch.name: patch.values.numel() for patch in patches}

    scale = "q_proj.weight_scale_inv" if form == "fp8_block" else "q_proj.weight_scale"
    assert sent(3, 5, 1e-3) == {"q_proj.weight": codes}
    assert sent(3, 6, 1.5)["q_proj.weight"] in (codes, all_codes)
    assert sent(3, 7, 1.75).get(scale) == (None if form == "fp8_block" else 1)
    larger = sent(3, 5, 4.0)
    if form == "nvfp4":  # The second scale changes, which k_proj has, too.
        assert larger["q_proj.weight_scale_2"] == larger["k_proj.weight_scale_2"] == 1
        assert larger["k_proj.weight"] == 144 * 16 and "o_proj.weight" not in larger
    else:
        assert larger == {"q_proj.weight": all_codes, scale: 1}


def test_delta_quantizer_merges_the_deltas_of_ranks_and_refuses_an_incomplete_set():
    model = Model().bfloat16()
    optimizer = mp_optim.AdamW(model.named_parameters(), lr=1e-4)
    optimizer.track_changes()
    quantizer = DeltaQuantizer("fp8_block", NAMES)
    replica = quantized_weights(model, "fp8_block", NAMES)
    after = None
    for step in range(4):
        model(torch.arange(16)).square().mean().backward()
        optimizer.step()
        whole = optimizer.changed_weights(full=step in (0, 3))
        if step == 3:  # A new receiver has nothing.
            replica = {name: torch.zeros_like(tensor) for name, tensor in replica.items()}
        halves = []
        for part in range(2):
            patches = []
            for patch in whole.patches:
                where = torch.arange(patch.numel) if patch.indices is None else patch.indices
                mine = where % 2 == part
                patches.append(patch._replace(values=patch.values[mine], indices=where[mine]))
            halves.append(replace(whole, part=part, parts=2, patches=tuple(patches)))
        with pytest.raises(ValueError, match="a publication has 2 parts"):
            quantizer.quantize(halves[:1], model)
        after = apply_delta(replica, quantizer.quantize(halves[::-1], model), after)
        assert bits_equal(replica, quantized_weights(model, "fp8_block", NAMES))


def test_delta_quantizer_refuses_weights_that_do_not_fit_the_publication():
    model, optimizer = fp16_trainer()
    optimizer.track_changes()
    for form, names, said in (
        ("fp4", NAMES, "form='fp4': this form is unknown; pass one of fp8_block, fp8_row, nvfp4"),
        ("fp8_row", "*.kernel", r"names='\*\.kernel': matches no weight"),
        ("fp8_row", "*.bias", r"bias has shape .*two dimensions; leave .*bias out"),
    ):
        with pytest.raises(ValueError, match=said):
            quantized_weights(model, form, names)
        with pytest.raises(ValueError, match=said):
            DeltaQuantizer(form, names).quantize(optimizer.changed_weights(full=True), model)
    with pytest.raises(ValueError, match="nvfp4 needs two dimensions and a multiple of 16"):
        quantized_weights({"q_proj.weight": torch.ones(4, 24)}, "nvfp4", NAMES)

    quantizer = DeltaQuantizer("fp8_row", NAMES)
    quantizer.quantize(optimizer.changed_weights(full=True), model)
    optimizer.changed_weights()
    with pytest.raises(ValueError, match="was not applied before publication"):
        quantizer.quantize(optimizer.changed_weights(), model)
    delta = optimizer.changed_weights(full=True)
    with torch.no_grad():
        model.q_proj.weight[0, 0] += 1.0
    with pytest.raises(ValueError, match=r"q_proj\.weight differs from the values in publication"):
        quantizer.quantize(delta, model)
    with torch.no_grad():
        model.q_proj.weight[0, 0] = torch.inf
    delta = optimizer.changed_weights(full=True)
    with pytest.raises(ValueError, match=r"q_proj\.weight has values that are not finite"):
        quantizer.quantize(delta, model)
    with torch.no_grad():
        model.q_proj.weight[0, 0] = 0.0
    delta = quantizer.quantize(optimizer.changed_weights(full=True), model)
    replica = quantized_weights(Model().half(), "fp8_row", NAMES)
    apply_delta(replica, delta)
    assert bits_equal(replica, quantized_weights(model, "fp8_row", NAMES))
