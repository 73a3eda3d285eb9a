"""What a run is made of. The defaults written here are the only ones: YAML files and flags change
them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from mp_optim import OptimizerConfig

Layout = Literal["single", "replicated", "zero1", "zero2", "layer_wise", "fsdp2"]
Family = Literal["llama", "mixtral", "qwen3_moe", "deepseek_v3", "olmoe"]


@dataclass
class ModelConfig:
    family: Family = "mixtral"
    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 256
    """Width of the dense MLP, and of each expert where the family has no separate field for
    that."""
    moe_intermediate_size: int | None = None
    """Width of each expert (qwen3_moe, deepseek_v3)."""
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    """None: as many as `num_heads`."""
    head_dim: int | None = None
    num_experts: int = 8
    num_experts_per_tok: int = 2
    num_shared_experts: int | None = None
    first_dense_layers: int | None = None
    """Leading layers without experts (deepseek_v3)."""
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    num_expert_groups: int | None = None
    """Expert groups of group-limited routing (deepseek_v3)."""
    top_expert_groups: int | None = None
    tie_embeddings: bool = False
    float8_weights: Literal["none", "tensor", "row"] = "none"
    """Keep matrices but for embeddings and output as float8_e4m3fn, with one scale each or one for
    each row."""


@dataclass
class DataConfig:
    """Bytes to learn from. `stdlib` is the text that every CPython carries; `synthetic` is the same
    on any machine."""

    source: Literal["stdlib", "synthetic"] = "stdlib"
    seq_length: int = 256
    max_megabytes: float = 16.0
    eval_every_nth_file: int = 20
    """Every nth file is held out for evaluation and never trained on."""


@dataclass
class SchedulerConfig:
    """The learning rate over steps. Its maximum and minimum are the optimizer's `lr` and
    `min_lr`."""

    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None
    """None: `run.steps`."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    lr_warmup_init: float = 0.0
    wsd_decay_steps: int | None = None
    """None: the last fifth of the steps."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "minus_sqrt"


@dataclass
class RunConfig:
    steps: int = 100
    global_batch_size: int = 8
    micro_batch_size: int = 8
    """Sequences per forward pass; gradients accumulate over global_batch_size / micro_batch_size of
    them."""
    seed: int = 1234
    layout: Layout = "single"
    """What the processes that torchrun started share out: nothing (replicated), the optimizer
    (zero1), gradients too (zero2), whole matrices of the optimizer (layer_wise), everything
    (fsdp2)."""
    device: str = "auto"
    """`auto`: the accelerator if there is one, else the CPU."""
    eval_interval: int | None = None
    """Evaluate every so many steps, and always at the end. None: never."""
    eval_batches: int = 4
    save_interval: int | None = None
    """Save a checkpoint every so many steps, and always at the end. None: never. Ctrl-C saves
    one."""
    keep: int | None = 3
    """How many of the newest checkpoints to keep. None: all."""
    output_dir: str = "runs/train"
    resume: Annotated[bool, tyro.conf.arg(aliases=["--resume"])] = False
    """Continue from the latest checkpoint in `output_dir`, if there is one; with more `steps` than
    before, a schedule without `lr_decay_steps` of its own gets longer."""


@dataclass
class TrainConfig:
    """Train a small language model over bytes with an mp_optim optimizer."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.run.micro_batch_size < 1 or self.run.global_batch_size % self.run.micro_batch_size:
            raise ValueError(
                f"run.global_batch_size={self.run.global_batch_size} is not a multiple of "
                f"run.micro_batch_size={self.run.micro_batch_size}"
            )
        for name, none in (("eval_interval", "never"), ("save_interval", "never"), ("keep", "all")):
            if (number := getattr(self.run, name)) is not None and number < 1:
                raise ValueError(f"run.{name}={number}: at least 1, or null for {none}")
        _check_model(self.model)
        if self.run.steps < 1:
            raise ValueError(f"run.steps={self.run.steps}: at least one step is needed")


def _check_model(model: ModelConfig) -> None:
    """Raise ValueError for sizes that contradict each other, which the model would only notice when
    it is called."""
    heads, kv_heads = model.num_heads, model.num_kv_heads or model.num_heads
    rules = {
        f"vocab_size={model.vocab_size}: at least 256, as it reads bytes": model.vocab_size >= 256,
        f"num_heads={heads}: not a multiple of num_kv_heads={kv_heads}": heads % kv_heads == 0,
        f"hidden_size={model.hidden_size}: not a multiple of num_heads={heads}; "
        "or give head_dim": model.head_dim is not None or model.hidden_size % heads == 0,
        f"num_experts_per_tok={model.num_experts_per_tok}: there are num_experts="
        f"{model.num_experts}": model.family == "llama"
        or model.num_experts_per_tok <= model.num_experts,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"model.{rule}")
