"""A deleted optimizer frees everything at once, without the garbage collector."""

import gc
import os
import random
import threading
import weakref

import pytest
import torch

# torch imports this module in its first optimizer and keeps the frames of that moment.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mp_optim
from mp_optim import OptimizerConfig, get_megatron_optimizer
from mp_optim.process_groups.process_groups import ProcessGroups

CLASSES = ("Adafactor", "Adam", "AdamW", "LAMB", "Lion", "Muon", "SGD")
PLACES = (
    {},
    {"offload": 0.5},
    {"offload": 1.0, "offload_mode": "overlap"},
    {"offload": 1.0, "offload_mode": "speculative"},
    {"offload": 1.0, "offload_mode": "overlap", "release_gradients": True},
    {"offload": 1.0, "offload_place": "streamed"},
    {"offload": 1.0, "optimizer_state_path": True},
    {"offload": 1.0, "optimizer_state_path": True, "offload_mode": "overlap"},
)
EXTRAS = (
    {"ema_decay": 0.9},
    {"main_params": "remainder16"},
    {"state": "8bit"},
    {"audit_rate": 1.0},
    {"log_param_grad_norms": 2},
    {"max_grad_norm": 1.0},
    {"skip_step_sigma_factor": 3.0},
)
ZERO = ("no_shard", "optim", "optim_grads", "layer_wise")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def model_of(dtype):
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8)).to(dtype)


def with_folder(settings, folder):
    chosen = dict(settings)
    if chosen.get("optimizer_state_path"):
        chosen["optimizer_state_path"] = str(folder)
    return chosen


def of_class(draw, folder):
    name = draw.choice(CLASSES)
    settings = with_folder(draw.choice(PLACES), folder)
    extra = draw.choice(EXTRAS)
    model = model_of(draw.choice((torch.bfloat16, torch.float32)))
    for chosen in ({**settings, **extra}, settings, extra, {}):
        try:
            return model, getattr(mp_optim, name)(model.named_parameters(), lr=1e-3, **chosen)
        except (TypeError, ValueError):  # This rule does not support the option or the placement.
            continue
    raise AssertionError(f"{name} cannot be built")


def of_factory(draw, folder, mesh):
    layout = draw.choice(("plain", "fsdp2", *ZERO))
    dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32))
    given = with_folder(draw.choice(PLACES[:5] + PLACES[6:]), folder)
    settings, groups = {}, None
    if fraction := given.pop("offload", 0.0):
        settings = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, **given}
    if layout in ZERO:
        groups = ProcessGroups(dp=dist.new_group([0]))
        settings["use_distributed_optimizer"] = True
        if layout == "layer_wise":
            settings["use_layer_wise_distributed_optimizer"] = True
        else:
            settings["data_parallel_sharding_strategy"] = layout
        if layout.startswith("optim") and draw.random() < 0.5:
            settings["overlap_param_gather"] = settings["overlap_grad_reduce"] = True
        settings.pop("release_gradients", None)
    model = model_of(dtype)
    if layout == "fsdp2":
        fully_shard(model, mesh=mesh)
    if draw.random() < 0.3 and layout != "fsdp2":  # Marked experts make a chain of two optimizers.
        for param in model[2].parameters():
            param.allreduce = False
    config = OptimizerConfig(
        lr=1e-3, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, **settings
    )
    given = {} if groups is None else {"process_groups": groups}
    return model, get_megatron_optimizer(config, [model], **given)


def backward(model, optimizer):
    loss = model(torch.randn(4, 24, dtype=next(model.parameters()).dtype)).float().sum()
    optimizer.scale_loss(loss).backward()


def fail(model, optimizer):
    backward(model, optimizer)
    optimizer.param_groups[0]["lr"] = "large"
    try:  # pytest.raises would keep the exception and the frames of the step.
        optimizer.step()
    except (TypeError, ValueError):
        optimizer.zero_grad()
    else:
        raise AssertionError("the step took a learning rate that is no number")


def trained(draw, model, optimizer):
    for _ in range(draw.choice((0, 1, 3))):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if draw.random() < 0.3:
        optimizer.state_dict()
    memory = memory_of(optimizer)
    if draw.random() < 0.4:
        fail(model, optimizer)
    return memory


def storage_of(tensor):
    local = getattr(tensor, "_local_tensor", getattr(tensor, "local", tensor))
    return local.untyped_storage()


def memory_of(optimizer):
    own = {storage_of(param).data_ptr() for param in optimizer.get_parameters()}
    found = []
    tensors = [main for _, main in optimizer.named_main_params()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage.data_ptr() not in own:
            found.append(weakref.ref(storage))
    return found


def links():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:  # The descriptor of the listing itself is closed already.
            continue
    return found


def left_on(model):
    found = []
    for name, param in model.named_parameters():
        hooks = getattr(param, "_post_accumulate_grad_hooks", None), param._backward_hooks
        found += [name] * any(hooks)
        found += [f"{name}.{key}" for key in vars(param) if not key.startswith(("_", "allreduce"))]
    if not hasattr(model, "reshard"):
        for name, module in model.named_modules():
            found += [name] * any((module._forward_pre_hooks, module._state_dict_pre_hooks))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(22))
def test_deleted_optimizer_frees_memory_threads_and_files_without_gc(seed, tmp_path, one_rank):
    draw = random.Random(f"freed {seed}")
    torch.manual_seed(seed)

    def life():
        if seed % 2:
            model, optimizer = of_class(draw, tmp_path)
        else:
            model, optimizer = of_factory(draw, tmp_path, one_rank)
        return model, weakref.ref(optimizer), trained(draw, model, optimizer)

    threads = set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        files = links()
        model, optimizer, memory = life()
        assert optimizer() is None
        assert [each() for each in memory if each() is not None] == []
        assert set(threading.enumerate()) <= threads
        assert {target for _, target in links() - files if "mp_optim" in target} == set()
        assert left_on(model) == []
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
