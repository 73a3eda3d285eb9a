"""Whether a model can be trained on a machine, activations included, and what to type: in Python,
for Hugging Face's Trainer, TRL, torchtitan and Megatron.

$ mp-optim fit --model Qwen3-8B --gpu 24GB --ram 64GB --seq 4096
$ mp-optim fit --model path/to/config.json --gpu 80GB --gpus 2 --ram 512GB --disk 2TB --json
$ mp-optim fit --model mine.py:build --gpu 16GB --ram 32GB
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import tyro
from torch import Tensor, nn

from mp_optim.planner.activations import (
    LOSSES,
    Batch,
    Timeline,
    as_fake,
    build_hf,
    checkpoint_blocks,
    hf_loss,
    trace,
    trace_repeating,
)
from mp_optim.planner.fit import Candidate, Estimate, Limits, Rates, blocks_of, search, step_seconds
from mp_optim.planner.memory import Layout, plan, specs_of
from mp_optim.planner.step_time import GB, MACHINES
from mp_optim.torch_style.optimizer import config_of

GIB = 2**30
AUTO = "auto"


@dataclass
class Options:
    """What to train, and on what. Memory as it is sold: 24GB of an accelerator or of a host are
    24 * 2**30 bytes; of a disk 24 * 10**9."""

    model: str
    """A name that is shipped (its last part will do), a Hugging Face config.json or its folder,
    or file.py:function, which returns a model and a function of the model that returns the loss."""
    gpu: str
    """Memory of one accelerator."""
    ram: str
    """Memory of the host."""
    gpus: int = 1
    """Accelerators of the host, data-parallel."""
    disk: str = "0GB"
    """Space on a local disk for the optimizer's state."""
    seq: int = 4096
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences, or pictures, of a micro-batch on one accelerator."""
    accumulation: int = 1
    """Micro-batches of a step."""
    lora: int = 0
    """Rank of adapters on all linear layers (peft); 0 trains everything."""
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """Whether blocks run forward again in backward."""
    loss: Literal["auto", "model", "fused"] = "auto"
    """The model's own, or Liger's fused linear cross entropy, which keeps no logits."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Fused, or with its weights as tensors."""
    main_params: Literal["exact", "none"] = "exact"
    """none: bfloat16 parameters alone, rounded stochastically. That is another training."""
    reserve: str = "1GB"
    """Of an accelerator, for the driver, libraries and what the allocator cannot use: assumed."""
    host_reserve: str = "4GB"
    """Of the host, for processes and the system: assumed."""
    rates: tuple[float, float, float, float, float] | None = None
    """GB/s of one accelerator: the bus up and down while both are busy, host memory, device memory
    (reading and writing together), disk. By default a desktop of PCIe 4 with two channels of
    DDR5-5600, and 3 GB/s of disk: assumed."""
    json: bool = False
    """Print data instead of text."""


_UNITS = {"": 30, "G": 30, "GB": 30, "GIB": 30, "T": 40, "TB": 40, "TIB": 40, "MB": 20, "MIB": 20}


def bytes_of(name: str, text: str, *, decimal: bool = False) -> int:
    """Bytes of a size as people write it.

    Args:
        name: of the option.
        decimal: whether GB are 10**9 bytes, as on a disk.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or match[1].count(".") > 1:
        raise ValueError(f"--{name} {text}: write a size such as 24GB or 1.5TB")
    power = _UNITS[match[2].upper()]
    is_decimal = decimal and not match[2].upper().endswith("IB")
    return int(float(match[1]) * (1000 ** (power // 10) if is_decimal else 2**power))


# -- the model ------------------------------------------------------------------------------------


@dataclass
class Program:
    """A model on the meta device, and its loss by name (of ``LOSSES``)."""

    model: nn.Module
    loss_of: Callable[[str], Callable[[nn.Module], Tensor]]
    vocabulary: int | None
    recipe: Recipe
    is_hf: bool


def shipped() -> dict[str, Any]:
    """Configs of common models by their name at Hugging Face: shapes, as in their config.json."""
    text = files("mp_optim.planner").joinpath("models.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def program(options: Options) -> Program:
    """What is trained.

    Raises:
        ValueError: the model is neither shipped, nor a path, nor a function.
        FileNotFoundError: there is no such file.
    """
    if ":" in options.model:
        return _program_of(options)
    import transformers

    ids = {_last_part(name): name for name in shipped()}
    name = ids.get(_last_part(options.model))
    if Path(options.model).exists():
        config, name = transformers.AutoConfig.from_pretrained(options.model), options.model
    elif name is not None:
        config = transformers.AutoConfig.for_model(**shipped()[name])
    else:
        raise ValueError(
            f"--model {options.model}: no such file, and none of those that are shipped "
            f"({', '.join(shipped())})"
        )
    model = build_hf(config, attention=options.attention, lora=options.lora)
    batch = Batch(options.seq, options.batch)
    vocabulary = getattr(config, "vocab_size", None)
    recipe = Recipe(
        options.model if "/" in options.model else name,
        _auto_class(getattr(config, "architectures", None) or ["ForCausalLM"]),
        *(options.batch, options.seq, options.gpus, options.accumulation, options.lora),
        options.attention,
    )
    return Program(model, lambda loss: hf_loss(batch, loss), vocabulary, recipe, True)


def _last_part(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _auto_class(architectures: Sequence[str]) -> str:
    """Of transformers, for a class such as ``LlamaForCausalLM``."""
    return f"AutoModelFor{architectures[0].rpartition('For')[2]}"


def _program_of(options: Options) -> Program:
    """A function of a file: ``(model, loss_of)``."""
    path, _, name = options.model.rpartition(":")
    spec = importlib.util.spec_from_file_location("model_to_fit", path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise FileNotFoundError(f"--model {options.model}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, name, None)
    if made is None:
        raise ValueError(f"--model {options.model}: {path} has no {name}")
    model, loss_of = made()
    recipe = Recipe(
        options.model,
        "AutoModel",
        *(options.batch, options.seq, options.gpus, options.accumulation, options.lora),
    )
    return Program(model, lambda _: loss_of, None, recipe, False)


# -- what is tried --------------------------------------------------------------------------------

_COMPACT = (
    {"state": "bf16", "main_params": "remainder16"},
    {"state": "8bit", "main_params": "remainder16"},
)
_RELEASED = {"offload": 1.0, "offload_mode": "overlap", "release_gradients": True}
_STREAMED = {"offload_place": "streamed"}
_PATH = "/mnt/nvme"


def candidates(options: Options) -> Iterator[Candidate]:
    """Settings in the order of docs/settings.md: on the accelerator; shared out over ranks; in
    fewer bits; part of it on the host; without resting gradients; streamed; on a disk."""
    one, many = Layout(), Layout(dp=options.gpus, sharding="fsdp2")
    shards = options.gpus > 1
    if options.main_params == "none":
        forms: tuple[dict[str, str], ...] = ({"state": "8bit", "main_params": "none"},)
    else:
        forms = ({}, *_COMPACT)
        yield Candidate({}, config_of("adam", {}))
        if shards:
            zero = replace(config_of("adam", {}), use_distributed_optimizer=True)
            yield Candidate({}, zero, Layout(dp=options.gpus))
    layout = many if shards else one
    for words in forms if shards else forms[options.main_params == "exact" :]:
        yield _candidate(words, layout)
    smallest = forms[-1]
    for offload in (0.25, 0.5, 0.75, 1.0):
        yield _candidate({**smallest, "offload": offload}, layout)
    yield _candidate({**smallest, **_RELEASED}, layout)
    yield _candidate({**smallest, **_RELEASED, **_STREAMED}, layout)
    if options.disk != Options.disk:
        on_disk = {"optimizer_state_path": _PATH}
        yield _candidate({**smallest, **_RELEASED, **_STREAMED, **on_disk}, layout)


def _candidate(words: dict[str, Any], layout: Layout) -> Candidate:
    return Candidate(words, config_of("adam", words), layout)


def ways(options: Options, made: Program) -> list[tuple[bool, str]]:
    """(checkpointing, loss), the cheapest in time first."""
    can_fuse = made.is_hf and "CausalLM" in made.recipe.auto_class
    losses = [loss for loss in LOSSES if options.loss in (AUTO, loss)]
    if not can_fuse or not losses:
        losses = ["model"]
    states = {AUTO: [False, True], "on": [True], "off": [False]}[options.checkpointing]
    if not made.is_hf:
        states = [False]
    return [(checkpointing, loss) for checkpointing in states for loss in losses]


def limits_of(options: Options) -> Limits:
    """What one rank may take."""
    return Limits(
        bytes_of("gpu", options.gpu),
        bytes_of("ram", options.ram) // options.gpus,
        bytes_of("disk", options.disk, decimal=True) // options.gpus,
        bytes_of("reserve", options.reserve),
        bytes_of("host-reserve", options.host_reserve) // options.gpus,
    )


def rates_of(options: Options) -> Rates:
    """What is assumed of a rank's bus, memory and disk."""
    if options.rates is None:
        return Rates()
    up, down, host, device, disk = (rate * GB for rate in options.rates)
    given = replace(MACHINES[0], name="as given", up=up, down=down, host=host, device=device)
    return Rates(given, disk)


def fitted(options: Options) -> tuple[Estimate, Program]:
    """The first settings that fit, or those of which least is missing.

    Raises:
        ValueError, TypeError: options that contradict, or a model that cannot be built.
    """
    made = program(options)
    specs, blocks = specs_of(made.model), blocks_of(made.model)
    fake = as_fake(made.model)

    @cache
    def traced(checkpointing: bool, loss: str) -> Timeline:
        if made.is_hf:
            checkpoint_blocks(made.model, checkpointing)
        loss_of, vocabulary = made.loss_of(loss), made.vocabulary
        return trace_repeating(
            made.model, lambda: trace(made.model, fake, loss_of, vocabulary=vocabulary)
        )

    found = search(
        candidates(options),
        lambda candidate: plan(specs, candidate.config, candidate.layout),
        traced,
        ways=ways(options, made),
        limits=limits_of(options),
        blocks=blocks,
        accumulates=options.accumulation > 1,
    )
    return step_seconds(found, rates_of(options)), made


# -- what is said ---------------------------------------------------------------------------------


def as_data(found: Estimate, options: Options, made: Program) -> dict[str, Any]:
    """The answer as plain data; bytes."""
    limits = limits_of(options)
    missing = found.missing(limits)
    layout = dataclasses.asdict(found.candidate.layout)
    return {
        "fits": not missing,
        "missing": missing,
        "settings": dict(found.candidate.words),
        "use_distributed_optimizer": found.candidate.config.is_distributed,
        "layout": layout,
        "checkpointing": found.checkpointing,
        "loss": found.loss,
        "peak": {"moment": found.moment, "bytes": found.device},
        "moments": {name: dict(sizes) for name, sizes in found.moments.items()},
        "host": found.plan.host_total,
        "host_for_a_save_in_the_background": found.plan.background_save,
        "disk": found.plan.disk.total,
        "optimizer_step_seconds": found.seconds,
        "assumed": assumptions(options),
        "recipes": recipes(found, made.recipe) if made.is_hf else {},
    }


def assumptions(options: Options) -> list[str]:
    """What the numbers rest on, beside shapes."""
    rates = rates_of(options)
    machine = rates.machine
    speeds = [machine.up, machine.down, machine.host, machine.device, rates.disk]
    shown = ", ".join(f"{speed / GB:.0f}" for speed in speeds)
    return [
        f"{options.reserve} of each accelerator and {options.host_reserve} of the host are "
        "somebody else's",
        "operations take what torch's do on the host, in eager mode",
        f"GB/s of bus up, bus down, host memory, device memory, disk: {shown} ({machine.name}); "
        "nothing of the optimizer's step is hidden behind backward",
        "predicted: the recipes of mp-optim fit have not run on a GPU",
    ]


def report(found: Estimate, options: Options, made: Program) -> str:
    """The answer as text."""
    limits = limits_of(options)
    lines = [verdict(found, limits), ""]
    lines += [f"settings: {_settings(found)}"]
    names = list(dict.fromkeys(name for sizes in found.moments.values() for name in sizes))
    heads = "".join(f"{moment:>12}" for moment in found.moments)
    lines += ["", f"{'GiB per accelerator':24}{heads}"]
    for name in names:
        sizes = [of.get(name, 0) for of in found.moments.values()]
        if any(sizes):
            lines.append(f"{name:24}" + "".join(f"{size / GIB:12.2f}" for size in sizes))
    totals = [sum(of.values()) for of in found.moments.values()]
    lines.append(f"{'total':24}" + "".join(f"{size / GIB:12.2f}" for size in totals))
    host = f"host: {found.plan.host_total / GIB:.2f} GiB per accelerator"
    saving = found.plan.background_save / GIB
    lines += ["", f"{host}, and {saving:.2f} while a save is in the background"]
    if found.plan.disk.total:
        lines.append(f"disk: {found.plan.disk.total / GIB:.2f} GiB per accelerator")
    if found.seconds is not None:
        lines.append(f"optimizer's step: {found.seconds:.2f} s")
    lines += ["", "assumed:", *(f"- {each}" for each in assumptions(options))]
    if made.is_hf:
        for name, text in recipes(found, made.recipe).items():
            lines += ["", f"# {name}", text]
    return "\n".join(lines)


def verdict(found: Estimate, limits: Limits) -> str:
    """One sentence."""
    missing = found.missing(limits)
    if missing:
        lacks = ", ".join(f"{size / GIB:.2f} GiB of {name}" for name, size in missing.items())
        return f"does not fit: of all that was tried this comes closest, and lacks {lacks}"
    free = (limits.device - found.device) / GIB
    return (
        f"fits: {free:.2f} GiB of each accelerator stay free in {found.moment}, the fullest moment"
    )


def _settings(found: Estimate) -> str:
    words = [f"{name}={value!r}" for name, value in found.candidate.words.items()]
    if found.candidate.config.is_distributed:
        words.append("use_distributed_optimizer=True")
    if found.candidate.layout.sharding == "fsdp2":
        words.append(f"FSDP2 over {found.candidate.layout.dp} ranks")
    words.append("blocks checkpointed" if found.checkpointing else "no checkpointing")
    words.append("fused loss" if found.loss == "fused" else "the model's own loss")
    return ", ".join(words)


def main(arguments: Sequence[str]) -> int:
    """Carry out a command line; returns the exit status: 0 if it fits, 3 if it does not."""
    options = tyro.cli(Options, args=arguments, prog="mp-optim fit", description=__doc__)
    found, made = fitted(options)
    if options.json:
        print(json.dumps(as_data(found, options, made), indent=2))
    else:
        print(report(found, options, made))
    return 3 if found.missing(limits_of(options)) else 0


@dataclass(frozen=True)
class Recipe:
    """What is trained, as the programs are told.

    Attributes:
        model: name or path, as a user gives it to ``from_pretrained``.
        auto_class: of transformers.
        batch, seq, gpus: sequences of a micro-batch, tokens of one, ranks.
        accumulation: micro-batches of a step.
        lora: rank of adapters, or 0.
        attention: "sdpa", which transformers takes by itself, or "eager".
        lr: a learning rate to begin with.
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


def recipes(found: Estimate, recipe: Recipe) -> dict[str, str]:
    """Text by program."""
    made = {"Python": python_lines(found, recipe)}
    if not found.candidate.config.is_distributed:
        made["Hugging Face Trainer"] = trainer_lines(found, recipe)
        if recipe.auto_class == "AutoModelForCausalLM":
            made["TRL"] = trl_lines(found, recipe)
        made["torchtitan"] = torchtitan_lines(found, recipe)
    made["Megatron-LM"] = megatron_lines(found, recipe)
    return made


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _model_lines(found: Estimate, recipe: Recipe) -> list[str]:
    plain = ", attn_implementation='eager'" if recipe.attention == "eager" else ""
    lines = [
        f"model = transformers.{recipe.auto_class}.from_pretrained("
        f"{recipe.model!r}, dtype=torch.bfloat16{plain})"
    ]
    if recipe.lora:
        lines.insert(0, "import peft")
        lines.append(f"adapters = {_adapters(recipe)}")
        lines.append("model = peft.get_peft_model(model, adapters)")
    return lines


def _adapters(recipe: Recipe) -> str:
    return f"peft.LoraConfig(r={recipe.lora}, target_modules='all-linear')"


def python_lines(found: Estimate, recipe: Recipe) -> str:
    """A model and its optimizer, ready for a loop."""
    lines = ["import mp_optim", "import torch", "import transformers", ""]
    lines += _model_lines(found, recipe)
    if found.checkpointing:
        how = "gradient_checkpointing_kwargs={'use_reentrant': False}"
        lines.append(f"model.gradient_checkpointing_enable({how})")
    if found.loss == "fused":
        lines.append(_FUSED)
    if found.candidate.layout.sharding == "fsdp2":
        lines += _FSDP2
    if found.candidate.config.is_distributed:
        lines += [
            "torch.distributed.init_process_group()",
            f"config = mp_optim.OptimizerConfig(lr={recipe.lr!r}, bf16=True, "
            "use_distributed_optimizer=True)",
            "optimizer = mp_optim.get_megatron_optimizer(config, model.cuda())",
        ]
    else:
        words = {"lr": recipe.lr, **found.candidate.words, "max_grad_norm": 1.0}
        call = f"optimizer = mp_optim.AdamW(model.named_parameters(), {_arguments(words)})"
        lines += [_TO_DEVICE, call]
    return "\n".join(lines)


_TO_DEVICE = "model.to('cuda' if torch.cuda.is_available() else 'cpu')"
_FUSED = "# the loss: liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss"
_FSDP2 = (
    "torch.distributed.init_process_group()",
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
        "max_grad_norm": 0.0,  # the optimizer clips
    }
    if found.loss == "fused":
        arguments["use_liger_kernel"] = True
    if found.candidate.layout.sharding == "fsdp2":
        arguments |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    return arguments


def _class_and_settings(found: Estimate) -> str:
    words = {"optimizer": "AdamW", **found.candidate.words, "max_grad_norm": 1.0}
    return f"optimizer_cls_and_kwargs=class_and_settings(arguments, {words!r})"


def trainer_lines(found: Estimate, recipe: Recipe) -> str:
    """Arguments and Trainer of transformers; ``data`` is yours."""
    arguments = _arguments(_training_arguments(found, recipe))
    return "\n".join(
        [
            "import torch",
            "import transformers",
            "from mp_optim.integrations.trainer_args import class_and_settings",
            "",
            *_model_lines(found, recipe),
            f"arguments = transformers.TrainingArguments({arguments})",
            f"trainer = transformers.Trainer(model, arguments, train_dataset=data, "
            f"{_class_and_settings(found)})",
        ]
    )


def trl_lines(found: Estimate, recipe: Recipe) -> str:
    """Arguments and trainer of TRL's supervised fine-tuning; ``data`` is yours."""
    arguments = _training_arguments(found, recipe) | {"max_length": recipe.seq}
    adapters = f"peft_config={_adapters(recipe)}, " if recipe.lora else ""
    lines = ["import peft"] if recipe.lora else []
    lines += ["import torch", "import transformers", "import trl"]
    lines += ["from mp_optim.integrations.trainer_args import class_and_settings", ""]
    lines += _model_lines(found, replace(recipe, lora=0))
    lines.append(f"arguments = trl.SFTConfig({_arguments(arguments)})")
    lines.append(
        f"trainer = trl.SFTTrainer(model, arguments, train_dataset=data, {adapters}"
        f"{_class_and_settings(found)})"
    )
    return "\n".join(lines)


def torchtitan_lines(found: Estimate, recipe: Recipe) -> str:
    """The container of optimizers."""
    words = dict(found.candidate.words)
    of_group = f"optimizer_name='AdamW', optimizer_kwargs={{'lr': {recipe.lr!r}}}"
    return "\n".join(
        [
            "from mp_optim.integrations.torchtitan import MpOptimizersContainer",
            "from torchtitan.components.optimizer import ParamGroupConfig",
            "",
            f"groups = [ParamGroupConfig(pattern='.*', {of_group})]",
            "config = MpOptimizersContainer.Config(param_groups=groups, "
            f"optimizer_factory_kwargs_by_name={{'AdamW': {words!r}}})",
        ]
    )


_MEGATRON_DTYPES = {"bf16": "bf16", "8bit": "fp8"}


def megatron_lines(found: Estimate, recipe: Recipe) -> str:
    """A command line of Megatron's program, or why there is none."""
    words = found.candidate.words
    no_such = words.get("main_params") == "none"  # nor has its command line a word for that
    if no_such or words.get("release_gradients") or found.candidate.layout.sharding == "fsdp2":
        return (
            "# none: Megatron's gradients lie in its own buffers, it has no FSDP2 of torch's and\n"
            "# no parameters without main params; split the model by --tensor-model-parallel-size\n"
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
    if found.loss == "fused":
        arguments += ["--cross-entropy-loss-fusion"]
    line = " ".join(map(str, arguments))
    start = f"torchrun --nproc-per-node {recipe.gpus} -m mp_optim.megatron pretrain_gpt.py"
    return f"{start} {line} [your model's and data's arguments]"
