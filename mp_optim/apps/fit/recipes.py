"""Programs that train with the settings of ``mp-optim fit``: Python, Hugging Face's Trainer, TRL,
torchtitan and Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mp_optim.apps.fit.fit import Estimate


@dataclass(frozen=True)
class Recipe:
    """The model and batch that the programs train.

    Attributes:
        model: name or path for ``from_pretrained``.
        auto_class: class of transformers that loads the model.
        batch: sequences of a micro-batch.
        seq: tokens of a sequence.
        gpus: number of ranks.
        accumulation: micro-batches of a step.
        lora: rank of adapters; 0 trains all parameters.
        attention: "sdpa", the default of transformers, or "eager".
        lr: first guess of the learning rate.
    """

    model: str
    auto_class: str
    batch: int
    seq: int
    gpus: int = 1
    accumulation: int = 1
    lora: int = 0
    attention: str = "sdpa"
    lr: float = 1e-5

    @property
    def is_causal(self) -> bool:
        """True if the model predicts the next token."""
        return self.auto_class == "AutoModelForCausalLM"


def recipes(found: Estimate, recipe: Recipe) -> dict[str, str]:
    """Return the text of each program by its name."""
    made = {"Python": python_lines(found, recipe)}
    if not found.candidate.config.is_distributed:
        made["Hugging Face Trainer"] = trainer_lines(found, recipe)
        if recipe.is_causal:
            made["TRL"] = trl_lines(found, recipe)
        made["torchtitan"] = torchtitan_lines(found, recipe)
    made["Megatron-LM"] = megatron_lines(found, recipe)
    return made


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _imports(*lines: str) -> list[str]:
    """Return import lines. The first line is the allocator's setting, because torch reads the
    setting when it is imported."""
    return ["import os", "", _ALLOCATOR, "", *lines, ""]


_ALLOCATOR = 'os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")'
_TRANSFORMERS = ("import torch", "import transformers")
_CHUNKED = "from mp_optim.apps.fit.chunked_loss import chunk_loss"


def _model_lines(found: Estimate, recipe: Recipe, *, chunked: bool) -> list[str]:
    """Return lines that build the model, its loss and its adapters."""
    plain = ", attn_implementation='eager'" if recipe.attention == "eager" else ""
    lines = [
        f"model = transformers.{recipe.auto_class}.from_pretrained("
        f"{recipe.model!r}, dtype=torch.bfloat16{plain})"
    ]
    if chunked:
        lines.append("chunk_loss(model)")
    if recipe.lora:
        lines.append(f"model = peft.get_peft_model(model, {_adapters(recipe)})")
    return lines


def _adapters(recipe: Recipe) -> str:
    return f"peft.LoraConfig(r={recipe.lora}, target_modules='all-linear')"


def python_lines(found: Estimate, recipe: Recipe) -> str:
    """Return lines that build a model and its optimizer, ready for a loop."""
    chunked = found.loss == "chunked"
    lines = _imports(
        "import mp_optim",
        *(["import peft"] if recipe.lora else []),
        *_TRANSFORMERS,
        *([_CHUNKED] if chunked else []),
    )
    lines += _model_lines(found, recipe, chunked=chunked)
    lines.append("model.train()  # from_pretrained leaves eval mode, which checkpoints no block")
    if recipe.is_causal:
        lines.append("model.config.use_cache = False")
    if found.checkpointing:
        how = "gradient_checkpointing_kwargs={'use_reentrant': False}"
        lines.append(f"model.gradient_checkpointing_enable({how})")
    if recipe.gpus > 1:
        lines += _RANKS
    lines.append(_TO_DEVICE)
    if found.candidate.layout.sharding == "fsdp2":
        lines += _FSDP2
    if found.candidate.config.is_distributed:
        lines += [
            f"config = mp_optim.OptimizerConfig(lr={recipe.lr!r}, bf16=True, "
            "use_distributed_optimizer=True)",
            "optimizer = mp_optim.get_megatron_optimizer(config, model)",
        ]
    else:
        words = {"lr": recipe.lr, **found.candidate.words, "max_grad_norm": 1.0}
        lines.append(f"optimizer = mp_optim.AdamW(model.named_parameters(), {_arguments(words)})")
    return "\n".join(lines)


_TO_DEVICE = "model.to('cuda' if torch.cuda.is_available() else 'cpu')"
_RANKS = (
    "if torch.cuda.is_available():",
    "    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
    "torch.distributed.init_process_group()",
)
_FSDP2 = (
    "blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]",
    "for module in [*blocks, model]:",
    "    torch.distributed.fsdp.fully_shard(module)",
)


def _training_arguments(found: Estimate, recipe: Recipe) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "output_dir": "out",
        "learning_rate": recipe.lr,
        "per_device_train_batch_size": recipe.batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_checkpointing": found.checkpointing,
        # The optimizer clips gradients itself, so the Trainer must not clip them again.
        "max_grad_norm": 0.0,
    }
    if found.candidate.layout.sharding == "fsdp2":
        arguments |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    return arguments


def _class_and_settings(found: Estimate) -> str:
    words = {"optimizer": "AdamW", **found.candidate.words, "max_grad_norm": 1.0}
    return f"optimizer_cls_and_kwargs=class_and_settings(arguments, {words!r})"


_OURS = "from mp_optim.apps.integrations.trainer_args import class_and_settings, log_own_norm"


def trainer_lines(found: Estimate, recipe: Recipe) -> str:
    """Return lines that build TrainingArguments and a Trainer of transformers. The user defines
    ``data``."""
    chunked = found.loss == "chunked"
    arguments = _arguments(_training_arguments(found, recipe))
    return "\n".join(
        [
            *_imports(
                *(["import peft"] if recipe.lora else []),
                *_TRANSFORMERS,
                _OURS,
                *([_CHUNKED] if chunked else []),
            ),
            *_model_lines(found, recipe, chunked=chunked),
            f"arguments = transformers.TrainingArguments({arguments})",
            f"trainer = transformers.Trainer(model, arguments, train_dataset=data, "
            f"{_class_and_settings(found)})",
            "log_own_norm(trainer)",
        ]
    )


def trl_lines(found: Estimate, recipe: Recipe) -> str:
    """Return lines that build the arguments and trainer of TRL's supervised fine-tuning. The user
    defines ``data``.

    TRL itself computes the loss of some tokens at a time. With ``bf16=True`` TRL would run a bf16
    model under autocast, which keeps FP32 copies.
    """
    arguments = _training_arguments(found, recipe) | {"max_length": recipe.seq, "bf16": False}
    adapters = f"peft_config={_adapters(recipe)}, " if recipe.lora else ""
    imports = [*(["import peft"] if recipe.lora else []), *_TRANSFORMERS, "import trl", _OURS]
    return "\n".join(
        [
            *_imports(*imports),
            *_model_lines(found, replace(recipe, lora=0), chunked=False),
            f"arguments = trl.SFTConfig({_arguments(arguments)})",
            f"trainer = trl.SFTTrainer(model, arguments, train_dataset=data, {adapters}"
            f"{_class_and_settings(found)})",
            "log_own_norm(trainer)",
        ]
    )


def torchtitan_lines(found: Estimate, recipe: Recipe) -> str:
    """Return lines for torchtitan's optimizer container."""
    words = dict(found.candidate.words)
    of_group = f"optimizer_name='AdamW', optimizer_kwargs={{'lr': {recipe.lr!r}}}"
    return "\n".join(
        [
            "from mp_optim.apps.integrations.torchtitan import MpOptimizersContainer",
            "from torchtitan.components.optimizer import ParamGroupConfig",
            "",
            f"groups = [ParamGroupConfig(pattern='.*', {of_group})]",
            "config = MpOptimizersContainer.Config(param_groups=groups, "
            f"optimizer_factory_kwargs_by_name={{'AdamW': {words!r}}})",
        ]
    )


_MEGATRON_DTYPES = {"bf16": "bf16", "8bit": "fp8"}
_OWN_FIELDS = {
    "offload_place": ("streamed", "offload_place=streamed"),
    "main_params": ("remainder8", "param_remainder_bits=8"),
}
"""Settings for which Megatron has no argument: the value of the setting, and the text for
``--set``."""


def megatron_lines(found: Estimate, recipe: Recipe) -> str:
    """Return a command line of Megatron's program, or the reason why none exists."""
    words = found.candidate.words
    # Megatron's command line has no argument for a stack without main params.
    no_such = words.get("main_params") == "none"
    if no_such or words.get("release_gradients") or found.candidate.layout.sharding == "fsdp2":
        return (
            "# none: Megatron stores gradients in its own buffers, and does not support these\n"
            "# settings; split the model with --tensor-model-parallel-size\n"
            "# or --pipeline-model-parallel-size instead"
        )
    arguments: list[Any] = [
        "--bf16",
        "--seq-length",
        recipe.seq,
        "--micro-batch-size",
        recipe.batch,
    ]
    arguments += ["--lr", recipe.lr, "--clip-grad", 1.0]
    if found.candidate.config.is_distributed or "state" in words:
        arguments.append("--use-distributed-optimizer")
    if "state" in words:
        dtype = _MEGATRON_DTYPES[words["state"]]
        arguments += ["--use-precision-aware-optimizer"]
        arguments += ["--exp-avg-dtype", dtype, "--exp-avg-sq-dtype", dtype]
    if words.get("offload"):
        arguments += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", words["offload"]]
    if found.checkpointing:
        arguments += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        arguments += ["--recompute-num-layers", 1]
    if found.loss == "chunked":
        arguments += ["--cross-entropy-loss-fusion"]
    line = " ".join(map(str, arguments))
    start = f"torchrun --nproc-per-node {recipe.gpus} -m mp_optim.megatron"
    for name, (value, field) in _OWN_FIELDS.items():
        if words.get(name) == value:
            start += f" --set {field}"
    return f"{start} pretrain_gpt.py {line} [your model's and data's arguments]"
