import dataclasses

import pytest

from mp_optim import OptimizerConfig

AWARE = {"use_precision_aware_optimizer": True}
MUON = {"optimizer": "muon"}
LION = {**MUON, "muon_scalar_optimizer": "lion"}
ZERO = {"use_distributed_optimizer": True}
STRATEGY = "data_parallel_sharding_strategy"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True"),
        ({"lr": 1e-3, "min_lr": 1.0}, "min_lr=1.0: must not exceed lr"),
        ({"optimizer": "adamm"}, "did you mean 'adam'"),
        ({"fused_backend": "refrence"}, "did you mean 'reference'"),
        ({"optimizer_offload_fraction": 0.5}, "no effect without optimizer_cpu_offload=True"),
        ({"optimizer_cpu_offload": True}, "without optimizer_offload_fraction"),
        ({"params_dtype": "bf16"}, "params_dtype=torch.bfloat16: contradicts"),
        ({**AWARE, "bf16": True, "fused_backend": "torch"}, "store_param_remainders=True"),
        ({**AWARE, "fused_backend": "torch", "exp_avg_dtype": "bf16"}, "fused_backend='torch'"),
        ({"fp16": True, "initial_loss_scale": 0.5}, "min_loss_scale=1.0: must not exceed"),
        ({"sgd_momentum": 0.5}, "sgd_momentum=0.5: has no effect with optimizer='adam'; choose"),
        ({"overlap_grad_reduce": True}, "has no effect without use_distributed_optimizer"),
        ({"use_layer_wise_distributed_optimizer": True, STRATEGY: "no_shard"}, "contradicts"),
        ({"muon_momentum": 0.9}, "muon_momentum=0.9: has no effect with optimizer='adam'"),
        ({**MUON, "muon_num_ns_steps": 6}, "muon_num_ns_steps=6: muon_coefficient_type='quintic'"),
        ({**MUON, "muon_tp_mode": "distributed"}, "order of additions depends on the ranks"),
        ({**MUON, "muon_fp32_matmul_prec": "high"}, "TF32"),
        ({**MUON, "lion_beta1": 0.5}, "lion_beta1=0.5: .* and muon_scalar_optimizer='adam'"),
        ({**LION, "adam_eps": 1e-6}, "adam_eps=1e-06: has no effect"),
        ({**MUON, "decoupled_weight_decay": False}, "decoupled_weight_decay=False: has no effect"),
        ({**LION, "fused_backend": "apex"}, "has no kernels for"),
    ],
)
def test_config_names_field_and_value_when_a_setting_is_invalid(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


def test_config_suggests_nearest_field_when_name_is_unknown():
    with pytest.raises(TypeError, match="did you mean 'optimizer'"):
        OptimizerConfig(optimiser="adam")
    with pytest.raises(TypeError, match="muon_use_nesterov"):
        OptimizerConfig(muon_nesterov=True)
    with pytest.raises(TypeError, match="did you mean 'weight_decay'"):
        OptimizerConfig.from_dict({"weightdecay": 0.1})
    with pytest.raises(TypeError, match=r"average_in_collective.*grad_reduce_op"):
        OptimizerConfig(average_in_collective=True)
    with pytest.raises(TypeError, match=r"optimizer_cuda_graph.*not captured.*leave it out"):
        OptimizerConfig(lr=0.1, optimizer_cuda_graph=True)


def test_config_has_megatron_defaults_and_copies_like_a_dataclass():
    config = OptimizerConfig(lr=1e-3, fp16=True)
    assert (config.initial_loss_scale, config.loss_scale_window, config.hysteresis) == (
        2.0**32,
        1000,
        2,
    )
    assert (config.clip_grad, config.weight_decay, config.adam_beta2, config.adam_eps) == (
        1.0,
        0.01,
        0.999,
        1e-8,
    )
    assert dataclasses.replace(config, lr=2e-3).lr == 2e-3
    assert OptimizerConfig(**dataclasses.asdict(config)) == config
