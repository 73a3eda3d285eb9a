"""docs/clients/megatron.md describes Megatron's config fields correctly."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
import megatron.core
import megatron_fields as tool
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from mp_optim.apps.megatron import config_from_megatron
from mp_optim.apps.megatron.config import DDP_FIELDS, OPTIMIZER_FIELDS, Kind

INSTALLED = Path(megatron.core.__file__).parents[2]
CONFIGS = {"OptimizerConfig": OptimizerConfig}
CONFIGS["DistributedDataParallelConfig"] = DistributedDataParallelConfig


@pytest.mark.parametrize("owner", tool.CLASSES, ids=lambda owner: owner.name)
def test_field_table_has_all_fields_of_the_installed_megatron(owner):
    read = tool.fields_in(INSTALLED, owner)
    names = [spec.name for spec in dataclasses.fields(CONFIGS[owner.name])]
    assert sorted(read) == sorted(names)
    assert not set(names) - set(owner.meanings)


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else "something"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (owner, name)
        for owner in tool.CLASSES
        for name, meaning in owner.meanings.items()
        if meaning.kind is Kind.REFUSED
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_config_from_megatron_refuses_fields_listed_as_refused(owner, name):
    """The table also lists fields of Megatron versions that are not installed."""
    fields: dict[str, Any] = {"lr": 1e-3, "optimizer": "adam", name: False}
    of_optimizer = owner.name == "OptimizerConfig"
    theirs = dataclasses.make_dataclass(
        owner.name, [(key, Any, dataclasses.field(default=value)) for key, value in fields.items()]
    )
    with pytest.raises(ValueError, match=rf"^{name}=True of Megatron's") as refusal:
        if of_optimizer:
            config_from_megatron(theirs(**{name: True}))
        else:
            chunk = SimpleNamespace(ddp_config=theirs(**{name: True}))
            config_from_megatron(OptimizerConfig(lr=1e-3), [chunk])
    assert owner.meanings[name].note in str(refusal.value)


def of_kind(kind: Kind, table: dict[str, Any], config: type) -> list[str]:
    present = {spec.name for spec in dataclasses.fields(config)}
    return [name for name in table if table[name].kind is kind and name in present]


@pytest.mark.parametrize("name", of_kind(Kind.WITHOUT_EFFECT, OPTIMIZER_FIELDS, OptimizerConfig))
def test_config_from_megatron_ignores_fields_listed_without_effect(name):
    config = OptimizerConfig(lr=1e-3)
    plain = config_from_megatron(config)
    setattr(config, name, other_than(getattr(config, name)))
    assert config_from_megatron(config) == plain


def in_ddp(**settings: Any) -> Any:
    ddp_config = DistributedDataParallelConfig()
    for name, value in settings.items():
        setattr(ddp_config, name, value)
    return SimpleNamespace(ddp_config=ddp_config)


@pytest.mark.parametrize("name", of_kind(Kind.DDP, DDP_FIELDS, DistributedDataParallelConfig))
def test_config_from_megatron_ignores_reduction_settings_of_megatron_ddp(name):
    value = other_than(getattr(DistributedDataParallelConfig(), name))
    config = OptimizerConfig(lr=1e-3)
    chunks = [in_ddp(**{name: value})]
    assert config_from_megatron(config, chunks) == config_from_megatron(config)


@pytest.mark.parametrize("ranks", [1, 2])
def test_config_from_megatron_refuses_a_model_with_sharded_gradients(ranks):
    sharded = in_ddp(use_distributed_optimizer=True)
    group = SimpleNamespace(size=lambda: ranks)
    sharded.buffers = [SimpleNamespace(data_parallel_group=group)]
    config = OptimizerConfig(lr=1e-3)
    if ranks == 1:  # The single rank holds whole gradients.
        assert not config_from_megatron(config, [sharded]).use_distributed_optimizer
        return
    with pytest.raises(ValueError, match=r"use_distributed_optimizer=True in the model"):
        config_from_megatron(config, [sharded])


@dataclasses.dataclass
class OfTomorrow:
    lr: float = 1e-3
    optimizer: str = "adam"
    muon_tp_mode: str = "duplicated"
    muon_nesterov: bool = False
    telepathy: bool = False


def test_config_from_megatron_refuses_an_unknown_field_only_when_set():
    assert config_from_megatron(OfTomorrow()).lr == 1e-3
    with pytest.raises(ValueError, match=r"^telepathy=True .*does not know the field"):
        config_from_megatron(OfTomorrow(telepathy=True))


def test_config_from_megatron_translates_renamed_muon_fields():
    theirs = OfTomorrow(optimizer="muon", muon_tp_mode="distributed", muon_nesterov=True)
    ours = config_from_megatron(theirs)
    assert ours.muon_use_nesterov and ours.muon_tp_mode == "duplicated"


def test_config_from_megatron_warns_when_lion_ignores_adam_betas():
    with pytest.warns(UserWarning, match="adam_beta1"):
        config_from_megatron(OfTomorrow(optimizer="lion"))


def test_config_from_megatron_refuses_main_params_that_are_not_fp32():
    config = OptimizerConfig(lr=1e-3)
    config.main_params_dtype = torch.float16
    with pytest.raises(ValueError, match=r"main_params_dtype=torch\.float16"):
        config_from_megatron(config)


STREAMS = "chunked_optimizer_state_offload"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({STREAMS: True}, (True, 1.0, "streamed", 256 << 20)),
        (
            {
                STREAMS: True,
                "optimizer_state_offload_fraction": 0.75,
                "optimizer_state_offload_chunk_size_mb": 64,
            },
            (True, 0.75, "streamed", 64 << 20),
        ),
        ({STREAMS: True, "optimizer_state_offload_fraction": 0.0}, (False, 0.0, "host", 256 << 20)),
        ({"optimizer_state_offload_fraction": 0.5}, (False, 0.0, "host", 256 << 20)),
        ({"offload_optimizer_states": True}, (True, 1.0, "streamed", 256 << 20)),
    ],
)
def test_config_from_megatron_translates_chunked_state_offload(theirs, ours):
    """The fields come from Megatron versions that are not installed."""
    fields = {
        "lr": 1e-3,
        "optimizer": "adam",
        "optimizer_cpu_offload": False,
        "offload_optimizer_states": False,
        STREAMS: False,
        "optimizer_state_offload_fraction": 1.0,
        "optimizer_state_offload_chunk_size_mb": 0,
    }
    newest = dataclasses.make_dataclass(
        "OptimizerConfig",
        [(name, Any, dataclasses.field(default=value)) for name, value in fields.items()],
    )
    config = config_from_megatron(newest(**theirs))
    assert ours == (
        config.optimizer_cpu_offload,
        config.optimizer_offload_fraction,
        config.offload_place,
        config.stream_window_bytes,
    )
    own = config_from_megatron(newest(**theirs), own_settings={"offload_place": "host"})
    assert own.offload_place == "host"
    if config.optimizer_cpu_offload:
        with pytest.raises(ValueError, match="set only one"):
            config_from_megatron(newest(**{**theirs, "optimizer_cpu_offload": True}))


@pytest.mark.parametrize("optimizer", ["adaptive_muon", "soap"])
def test_config_from_megatron_refuses_an_optimizer_that_is_not_supported(optimizer):
    fields = [("optimizer", str, optimizer), ("lr", float, 1e-3), ("bf16", bool, True)]
    config = dataclasses.make_dataclass("Config", fields)()
    with pytest.raises(ValueError, match=f"optimizer='{optimizer}': must be one of"):
        config_from_megatron(config, [], {})
