"""Programs that train with the settings of ``mp-optim fit``: plain Python, and Hugging Face's
Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mp_optim.apps.fit.fit import Estimate


@dataclass(frozen=True)
class Recipe:
    """The model and batch that the programs train.

    Attributes:
        model: name or path for ``from_pretrained``.
        auto_class: class of transformers that loads the model.
        batch: sequences of a micro-batch.
        gpus: number of ranks.
        accumulation: micro-batches of a step.
        lora: rank of adapters; 0 trains all parameters.
        attention: "sdpa", the default of transformers, or "eager".
    """

    model: str
    auto_class: str
    batch: int = 1
    gpus: int = 1
    accumulation: int = 1
    lora: int = 0
    attention: str = "sdpa"


_LR = 1e-5
"""First guess of the learning rate in printed programs."""
_TRAINER = "from mp_optim.apps.integrations.trainer_args import class_and_settings, log_own_norm"


def recipes(found: Estimate, recipe: Recipe) -> dict[str, str]:
    """Return the text of each program by its name. The user of the Trainer's program defines
    ``data``."""
    made = {"Python": python_lines(found, recipe)}
    if found.candidate.config.is_distributed:
        return made
    arguments: dict[str, Any] = {
        "output_dir": "out",
        "learning_rate": _LR,
        "per_device_train_batch_size": recipe.batch,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_checkpointing": found.checkpointing,
        # The optimizer clips gradients itself, so the Trainer must not clip them again.
        "max_grad_norm": 0.0,
    }
    if found.candidate.layout.sharding == "fsdp2":
        arguments |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    words = {"optimizer": "AdamW", **found.candidate.words, "max_grad_norm": 1.0}
    lines = [
        *_model_lines(found, recipe, _TRAINER),
        f"arguments = transformers.TrainingArguments({_arguments(arguments)})",
        "trainer = transformers.Trainer(model, arguments, train_dataset=data, "
        f"optimizer_cls_and_kwargs=class_and_settings(arguments, {words!r}))",
        "log_own_norm(trainer)",
    ]
    return {**made, "Hugging Face Trainer": "\n".join(lines)}


def _model_lines(found: Estimate, recipe: Recipe, *imports: str) -> list[str]:
    """Return lines that import packages, and build the model, its loss and its adapters."""
    plain = ", attn_implementation='eager'" if recipe.attention == "eager" else ""
    lines = ["import os", ""]
    # torch reads the variable when it is imported, so the line that sets the variable precedes the
    # imports.
    lines.append('os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")\n')
    lines += [*imports, *(["import peft"] if recipe.lora else [])]
    lines += ["import torch", "import transformers"]
    if found.loss == "chunked":
        lines.append("from mp_optim.apps.fit.chunked_loss import chunk_loss")
    lines += [
        "",
        f"model = transformers.{recipe.auto_class}.from_pretrained("
        f"{recipe.model!r}, dtype=torch.bfloat16{plain})",
    ]
    if found.loss == "chunked":
        lines.append("chunk_loss(model)")
    if recipe.lora:
        adapters = f"peft.LoraConfig(r={recipe.lora}, target_modules='all-linear')"
        lines.append(f"model = peft.get_peft_model(model, {adapters})")
    return lines


def python_lines(found: Estimate, recipe: Recipe) -> str:
    """Return lines that build a model and its optimizer, ready for a loop."""
    lines = _model_lines(found, recipe, "import mp_optim")
    lines.append("model.train()  # from_pretrained leaves eval mode, which checkpoints no block")
    if recipe.auto_class == "AutoModelForCausalLM":
        lines.append("model.config.use_cache = False")
    if found.checkpointing:
        how = "gradient_checkpointing_kwargs={'use_reentrant': False}"
        lines.append(f"model.gradient_checkpointing_enable({how})")
    if recipe.gpus > 1:
        lines += [
            "if torch.cuda.is_available():",
            "    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            "torch.distributed.init_process_group()",
        ]
    lines.append("model.to('cuda' if torch.cuda.is_available() else 'cpu')")
    if found.candidate.layout.sharding == "fsdp2":
        lines += [
            "blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]",
            "for module in [*blocks, model]:",
            "    torch.distributed.fsdp.fully_shard(module)",
        ]
    if found.candidate.config.is_distributed:
        lines += [
            f"config = mp_optim.OptimizerConfig(lr={_LR!r}, bf16=True, "
            "use_distributed_optimizer=True)",
            "optimizer = mp_optim.get_megatron_optimizer(config, model)",
        ]
    else:
        words = _arguments({"lr": _LR, **found.candidate.words, "max_grad_norm": 1.0})
        lines.append(f"optimizer = mp_optim.AdamW(model.named_parameters(), {words})")
    return "\n".join(lines)


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
