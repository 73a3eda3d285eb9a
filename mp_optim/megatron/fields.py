"""What becomes of each field of Megatron's ``OptimizerConfig`` and of the config of its DDP.

:mod:`mp_optim.megatron.config` goes by these tables, and ``tools/megatron_fields.py`` prints them
into docs/migrate.md, so what is documented is what is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any


class Kind(Enum):
    """What happens to a field."""

    SAME = "same"
    RENAMED = "other name"
    WITHOUT_EFFECT = "accepted, no effect"
    DDP = "its DDP does it"
    REFUSED = "refused if set"


@dataclass(frozen=True)
class Meaning:
    """What a field is here.

    Attributes:
        name: of the field here, if that is another.
        note: what to know, or to use instead.
        values: of the field there that are called otherwise here.
    """

    kind: Kind
    note: str = ""
    name: str = ""
    values: Mapping[Any, Any] = field(default_factory=lambda: MappingProxyType({}))


SAME = Meaning(Kind.SAME)
_DDP = Meaning(Kind.DDP)


def _noted(note: str) -> Meaning:
    return Meaning(Kind.SAME, note)


def _ignored(note: str) -> Meaning:
    return Meaning(Kind.WITHOUT_EFFECT, note)


def _refused(note: str) -> Meaning:
    return Meaning(Kind.REFUSED, note)


_MOMENT = _noted(
    "float16 and uint8 have a scale for each block of 256, not one for all"
)
_SOAP = _ignored('read by optimizer="soap", which is refused')
_ADAPTIVE = _ignored('read by optimizer="adaptive_muon", which is refused')
_WHOLE_8_BIT = _refused(
    "parameters in 8 bits are stepped where they are whole, not sharded; leave it False"
)
_CHUNKS = _refused(
    "state is kept on the host by --optimizer-cpu-offload and optimizer_offload_fraction, and "
    "stepped on the device by install(offload_place='streamed')"
)
_CHUNKS_OF = _refused(
    "of chunked_optimizer_state_offload, which is refused; leave it at its default, and use "
    "--optimizer-cpu-offload"
)
_FSDP = _ignored("read by Megatron-FSDP, which is refused")
_NO_FSDP = _refused(
    "use torch's FSDP2 (--use-torch-fsdp2), whose DTensors are stepped shard by shard"
)

OPTIMIZER_FIELDS: dict[str, Meaning] = {
    **dict.fromkeys(
        (
            "lr",
            "min_lr",
            "decoupled_lr",
            "decoupled_min_lr",
            "weight_decay",
            "apply_wd_to_qk_layernorm",
            "fp16",
            "bf16",
            "use_precision_aware_optimizer",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "decoupled_weight_decay",
            "sgd_momentum",
            "muon_momentum",
            "muon_use_nesterov",
            "muon_split_qkv",
            "muon_scale_mode",
            "muon_num_ns_steps",
            "muon_extra_scale_factor",
            "muon_scalar_optimizer",
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
            "use_distributed_optimizer",
            "clip_grad",
            "grad_norm_skip_threshold",
            "log_num_zeros_in_grad",
            "barrier_with_L1_time",
        ),
        SAME,
    ),
    "optimizer": Meaning(
        Kind.SAME,
        "adam, sgd, muon, lion, and dist_muon as muon with "
        "use_layer_wise_distributed_optimizer; others are refused",
        values=MappingProxyType({"dist_muon": "muon"}),
    ),
    "fp8_recipe": _ignored(
        "parameters in 8 bits are recognised, and quantised by their own recipe"
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": _WHOLE_8_BIT,
    "params_dtype": _noted("has to fit fp16 and bf16"),
    "store_param_remainders": _noted("on the host too, and without Transformer Engine"),
    "main_grads_dtype": _ignored(
        "gradients are read in the dtype of DDP's buffers, and widened in registers"
    ),
    "main_params_dtype": _noted("float32; others are refused"),
    "exp_avg_dtype": _MOMENT,
    "exp_avg_sq_dtype": _MOMENT,
    "loss_scale": _noted("with muon and lion too, where Megatron drops it"),
    "muon_nesterov": Meaning(Kind.RENAMED, name="muon_use_nesterov"),
    "muon_fp32_matmul_prec": _noted("medium, highest; high is refused"),
    "muon_coefficient_type": _noted("simple, quintic, polar_express; others refused"),
    "muon_tp_mode": Meaning(
        Kind.SAME,
        "distributed is taken as duplicated: either is of the whole matrix",
        values=MappingProxyType({"distributed": "duplicated"}),
    ),
    "muon_use_syrk": _ignored("another kernel for the same product"),
    **dict.fromkeys(
        ("lion_beta1", "lion_beta2"),
        _noted('with optimizer="lion" too, where Megatron reads those of Adam'),
    ),
    **dict.fromkeys(("soap_shampoo_beta", "soap_use_kl_shampoo"), _SOAP),
    **dict.fromkeys(
        (
            "adaptive_muon_moment2_method",
            "adaptive_muon_beta2",
            "adaptive_muon_eps",
        ),
        _ADAPTIVE,
    ),
    "use_layer_wise_distributed_optimizer": _noted(
        "Megatron's DDP lays whole matrices out by rank; with the bare module, buckets here do"
    ),
    "use_layer_wise_param_layout": _ignored(
        "how the buffers of its DDP are laid out decides"
    ),
    "overlap_param_gather": _noted("the DDP config decides it"),
    "overlap_param_gather_with_optimizer_step": _refused(
        "overlap_param_gather=True gathers during the next forward"
    ),
    "chunked_optimizer_state_offload": _CHUNKS,
    "offload_optimizer_states": _CHUNKS,
    "optimizer_state_offload_chunk_size_mb": _CHUNKS_OF,
    "optimizer_state_offload_fraction": _CHUNKS_OF,
    "use_torch_optimizer_for_cpu_offload": _ignored(
        "Megatron, too, sets it aside in the lines that follow"
    ),
    "timers": _noted("around measuring and stepping"),
    "config_logger_dir": _ignored("nothing is written there"),
    "optimizer_cuda_graph": _noted(
        "the step captures itself; Megatron's wrapper around it is left out"
    ),
}
"""By field of ``OptimizerConfig``."""

DDP_FIELDS: dict[str, Meaning] = {
    **dict.fromkeys(
        (
            "overlap_grad_reduce",
            "align_param_gather",
            "check_for_nan_in_grad",
            "check_for_large_grads",
            "bucket_size",
            "num_buckets",
            "pad_buckets_for_high_nccl_busbw",
            "reduce_scatter_with_fp32_accumulation",
            "param_name_patterns_for_fp32_local_accumulation",
            "average_in_collective",
            "nccl_ub",
            "disable_symmetric_registration",
            "delay_wgrad_compute",
            "use_layer_wise_param_layout",
            "disable_grad_buffers_cpu_backup",
        ),
        _DDP,
    ),
    "grad_reduce_in_fp32": Meaning(
        Kind.DDP, "gradients are read in the dtype that main_grad has"
    ),
    "overlap_param_gather": _noted("gathered by its forward hooks"),
    "use_distributed_optimizer": _noted("has to be what OptimizerConfig says"),
    "num_distributed_optimizer_instances": _refused(
        "state is shared out over all data-parallel ranks; leave it 1"
    ),
    "fp8_param_gather": _WHOLE_8_BIT,
    "fp4_param_gather": _refused("parameters in 4 bits are not known here"),
    "reuse_grad_buf_for_mxfp8_param_ag": _WHOLE_8_BIT,
    "disable_param_buffers_cpu_backup": _refused(
        "parameters that come back without their values are not written again from the main "
        "params; leave it False"
    ),
    "use_megatron_fsdp": _NO_FSDP,
    "use_custom_fsdp": _NO_FSDP,
    **dict.fromkeys(
        (
            "megatron_fsdp_version",
            "data_parallel_sharding_strategy",
            "gradient_reduce_div_fusion",
            "suggested_communication_unit_size",
            "preserve_fp32_weights",
            "keep_fp8_transpose_cache",
            "fsdp_double_buffer",
            "fsdp_db_use_persist_buf_on_alloc_fail",
            "fsdp_all_gather_in_start_param_sync",
            "outer_dp_sharding_strategy",
            "fsdp_manual_registration",
            "megatron_fsdp_main_params_dtype",
            "megatron_fsdp_main_grads_dtype",
            "megatron_fsdp_grad_comm_dtype",
            "megatron_fsdp_use_decoupled_grad",
            "megatron_fsdp_cuda_graph_mode",
            "megatron_fsdp_enable_fine_grained_param_gather",
            "megatron_fsdp_max_pool_double_buffer",
            "megatron_fsdp_prefetch_recompute_forward_weights",
            "megatron_fsdp_cache_param_bucket_views",
        ),
        _FSDP,
    ),
}
"""By field of ``DistributedDataParallelConfig``."""
