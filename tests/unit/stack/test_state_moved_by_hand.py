"""Programs move state by ``optimizer.state[param][key] = ...`` on a simulated accelerator: the move
takes effect or is refused, and changes no bit of training."""

import copy
import gc
import itertools
import tempfile
import warnings
import weakref

import pytest
import torch
from torch import nn

import mp_optim
from mp_optim import get_megatron_optimizer
from mp_optim.host.transfer import transfer_for
from support.accelerator.disk import simulated_disk
from support.accelerator.simulation import COLLECTIVES, device_at
from support.accelerator.stand_in import simulated_accelerator
from support.models import DTYPES, TinyMoE, config_for, is_expert, same_bits, tokens_of
from support.moved_by_hand import HELPERS, all_to
from support.offload import differing, hybrids, params_of, state_of
from support.one_rank import one_rank

DEVICE, HOST = device_at(1), torch.device("cpu")
WARNING = "stays on the host"
_SPILLED = {"optimizer_state_path": tempfile.gettempdir(), "stream_window_bytes": 65536}
PLACES = {
    "device": (0.0, {}),
    "host": (0.7, {}),
    "overlap": (0.7, {"offload_mode": "overlap"}),
    "speculative": (0.7, {"offload_mode": "speculative"}),
    "streamed": (0.7, {"offload_place": "streamed", "stream_window_bytes": 4096}),
    "disk": (0.7, _SPILLED),
}

pytestmark = [pytest.mark.native, pytest.mark.filterwarnings("ignore:a step was skipped")]


@pytest.fixture(scope="module", autouse=True)
def alone():
    with one_rank(COLLECTIVES):
        yield


@pytest.fixture
def simulation():
    with simulated_accelerator() as simulation, simulated_disk(simulation):
        yield simulation
        gc.collect()
        simulation.synchronize()
        assert not simulation.reports, "\n".join(simulation.reports)


def build(form, place="device", device=DEVICE):
    fraction, settings = PLACES[place]
    model = TinyMoE(DTYPES[form.split("-")[0]]).to(device)
    config = config_for(form, fraction, **settings)
    optimizer = get_megatron_optimizer(config, model, expert_predicate=is_expert)
    for part in hybrids(optimizer):
        part.stepper.use_transfer(transfer_for(device), 256)
    return model, optimizer


def train(model, optimizer, steps, start=0):
    device = next(model.parameters()).device
    for step in range(start, start + steps):
        optimizer.zero_grad()
        optimizer.scale_loss(model(tokens_of(step).to(device))).backward()
        optimizer.step()


def found(model, optimizer):
    bits = {**params_of(model), **state_of(optimizer)}
    return {name: value.cpu() for name, value in bits.items()}


def kept(optimizer):
    for slot in optimizer.slots():
        for key, value in optimizer.state_of(slot).live().items():
            if key != "step":
                yield f"{optimizer.slot_name(slot)}.{key}", value


def on_accelerator(optimizer):
    return [name for name, value in kept(optimizer) if value.device != HOST]


def expected(form, steps=4):
    model, optimizer = build(form, device=HOST)
    train(model, optimizer, steps)
    return found(model, optimizer)


BY_DAY = {("streamed", "areal"), ("disk", "skyrl")}
PAIRS = [
    pytest.param(*pair, marks=() if pair in BY_DAY else pytest.mark.slow)
    for pair in itertools.product(PLACES, HELPERS)
]


@pytest.mark.parametrize(("place", "helper"), PAIRS)
def test_offload_helpers_of_rl_programs_move_state_and_change_no_bit(simulation, place, helper):
    assert_helper_keeps_bits("bf16", place, HELPERS[helper])


def assert_helper_keeps_bits(form, place, helper):
    model, optimizer = build(form, place)
    homes = None
    for start in (0, 2):
        train(model, optimizer, 2, start)
        homes = {name: value.device for name, value in kept(optimizer)}
        helper(optimizer, HOST)
        if helper is not HELPERS["areal"]:
            assert on_accelerator(optimizer) == []
        else:
            assert not any("exp_avg" in name for name in on_accelerator(optimizer))
        if DEVICE in homes.values():
            with pytest.raises(RuntimeError, match=r"restore_from_cpu\(\) before step"):
                optimizer.step()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            helper(optimizer, DEVICE)
        said = [str(each.message) for each in said if WARNING in str(each.message)]
        assert bool(said) == (place != "device" and start == 0)
        assert {name: value.device for name, value in kept(optimizer)} == homes
    assert not differing(found(model, optimizer), expected(form))


@pytest.mark.parametrize("form", ["fp32", pytest.param("bf16-8bit8", marks=pytest.mark.slow)])
def test_load_state_dict_keeps_state_on_the_host_when_the_caller_moved_state(simulation, form):
    model, optimizer = build(form)
    train(model, optimizer, 2)
    before = found(model, optimizer)
    all_to(optimizer, HOST)
    full = optimizer.state_dict(full_precision=True)
    assert full["state"] and dict(optimizer.named_main_params())
    saved = copy.deepcopy(optimizer.state_dict())
    assert not differing(found(model, optimizer), before)
    assert on_accelerator(optimizer) == []
    optimizer.load_state_dict(saved)
    optimizer.reload_model_params()
    optimizer.load_state_dict(saved)
    assert on_accelerator(optimizer) == [] and not differing(found(model, optimizer), before)
    optimizer.restore_from_cpu()
    assert len(on_accelerator(optimizer)) == len(list(kept(optimizer)))
    train(model, optimizer, 2, 2)
    assert not differing(found(model, optimizer), expected(form))


@pytest.mark.parametrize("offload", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_moves_with_a_model_that_moves_between_steps(simulation, dtype, offload):
    def run(*homes):
        layer = nn.Linear(6, 5, device=HOST).to(dtype)
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(torch.arange(param.numel()).view_as(param) / 7)
        optimizer = mp_optim.AdamW(layer.parameters(), lr=1e-2, offload=offload)
        for step, home in enumerate(homes):
            layer.to(home)
            for param in layer.parameters():
                param.grad = torch.full_like(param, 0.5 + step)
            optimizer.step()
        return [param.detach().cpu() for param in layer.parameters()]

    assert all(map(same_bits, run(DEVICE, HOST, HOST, DEVICE), run(*[DEVICE] * 4)))


def test_assignment_to_state_changes_nothing_when_the_value_is_unsupported(simulation):
    model, optimizer = build("bf16", "host")
    train(model, optimizer, 1)
    before, there = found(model, optimizer), on_accelerator(optimizer)
    slot = next(slot for slot in optimizer.slots() if optimizer.home(slot) == DEVICE)
    param = optimizer.param_groups[slot.group]["params"][slot.position]
    name = optimizer.slot_name(slot)
    state = optimizer.state[param]
    value = state["exp_avg"]
    for key, wrong, words in [
        ("exp_avg", torch.zeros(3, 3, 3), rf"{name}\.exp_avg.*shape"),
        ("exp_avg", value.double().cpu(), rf"{name}\.exp_avg.*float64"),
        ("exp_avg", "text", rf"{name}\.exp_avg"),
        ("exp_avg", torch.zeros_like(value).to(device_at(0)), rf"{name}\.exp_avg is stepped on"),
        ("exp_avg_sq", torch.full_like(value, -1.0), rf"{name}\.exp_avg_sq.*negative"),
        ("exp_avg_sq", torch.full_like(value, -1.0).cpu(), rf"{name}\.exp_avg_sq.*negative"),
        ("note", value, rf"{name} has no 'note'.*dict of your own"),
        ("step", torch.tensor(-1.0), rf"{name}\.step"),
    ]:
        with pytest.raises(ValueError, match=words):
            state[key] = wrong
    for taken_away in (lambda: state.pop("exp_avg"), lambda: state.__delitem__("step")):
        with pytest.raises(TypeError, match=r"call clear\(\) to reset all"):
            taken_away()
    with pytest.raises(ValueError, match="note"):
        state.update(exp_avg=value.cpu(), note=1)
    assert on_accelerator(optimizer) == there and not differing(found(model, optimizer), before)


def test_state_view_holds_no_memory_after_state_was_moved_or_replaced(simulation):
    model, optimizer = build("bf16-4bit")
    train(model, optimizer, 1)
    view, state = optimizer.state, optimizer.state[model.dense]
    old = weakref.ref(model.dense)
    copies = [weakref.ref(state["exp_avg"])]
    memory = [simulation.memory.of(value) for _, value in kept(optimizer)]
    all_to(optimizer, HOST)
    gc.collect()
    simulation.synchronize()
    assert len(memory) > 9 and all(region.is_let_go for region in memory)
    memory = [simulation.memory.of(value) for _, value in kept(optimizer)]
    shown = weakref.ref(state)
    del state
    replaced = nn.Parameter(model.dense.detach().clone())
    for group in optimizer.param_groups:
        group["params"][:] = [replaced if p is model.dense else p for p in group["params"]]
    model.dense = replaced
    optimizer.restore_from_cpu()
    train(model, optimizer, 1, 1)
    gc.collect()
    assert old() is None and shown() is None and copies[0]() is None
    assert all(region.is_let_go for region in memory)
    assert len(view) == len(list(model.parameters()))


@pytest.mark.parametrize("place", ["device", "host", "streamed"])
@pytest.mark.parametrize("form", ["fp32", pytest.param("bf16-8bit8", marks=pytest.mark.slow)])
def test_step_moves_state_back_to_its_device_when_tensor_data_was_moved(simulation, form, place):
    model, optimizer = build(form, place)
    for start in (0, 2):
        train(model, optimizer, 2, start)
        there = on_accelerator(optimizer)
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        tensors += [main for _, main in optimizer.named_main_params()]
        for tensor in tensors:
            # Moments in 8 bits appear as read-only copies, whose ``.data`` raises.
            if not (isinstance(tensor, nn.Parameter) or tensor.is_inference()):
                tensor.data = tensor.data.to(HOST)
    train(model, optimizer, 1, 4)
    assert on_accelerator(optimizer) == there
    assert not differing(found(model, optimizer), expected(form, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_assignment_stores_host_values_of_each_dtype_for_fp16_moments(simulation, dtype):
    param = nn.Parameter(torch.ones(300).to(DEVICE))
    optimizer = mp_optim.AdamW([param], state="fp16")
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = torch.full((300,), 0.25, dtype=dtype)
    assert torch.equal(optimizer.state[param]["exp_avg"].cpu(), torch.full((300,), 0.25))
