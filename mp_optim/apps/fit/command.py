"""Estimate whether a model can be trained on a machine, activations included, and print a program
that trains the model.

Programs are printed for plain Python and for Hugging Face's Trainer.

$ mp-optim fit --model Qwen3-8B --gpu 24GB --ram 64GB --seq 4096
$ mp-optim fit --model path/to/config.json --gpu 80GB --gpus 2 --ram 512GB --disk 2TB --json
$ mp-optim fit --model mine.py:build --gpu 16GB --ram 32GB
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import tyro
from torch import Tensor, nn

from mp_optim.apps.cli.command import hf_config, model_errors
from mp_optim.apps.fit.activations import (
    LOSSES,
    Timeline,
    as_fake,
    build_hf,
    checkpoint_blocks,
    hf_loss,
    trace,
)
from mp_optim.apps.fit.chunked_loss import can_chunk, chunk_loss
from mp_optim.apps.fit.fit import (
    ERROR,
    SOLD,
    Candidate,
    Estimate,
    Limits,
    gathered_bytes,
    search,
    step_seconds,
)
from mp_optim.apps.fit.model_plan import Layout, plan, specs_of
from mp_optim.apps.fit.recipes import Recipe, recipes
from mp_optim.apps.fit.step_time import DESKTOP, GB, Machine
from mp_optim.optimizers.settings import config_of

GIB = 2**30
AUTO = "auto"


@dataclass
class Options:
    """The training and the machine.

    Sizes in GB are the sizes in which memory is sold. A card of 24GB has 24 GiB (24 * 2**30 bytes),
    of which torch reports 98 %; a size in GiB is used unchanged. A host of 64GB has 64 GiB. A
    disk's GB are 10**9 bytes.
    """

    model: str
    """Name of a shipped model (the last part of the name is enough), a Hugging Face config.json
    or its folder, or file.py:function. The function returns a model and a function from the
    model to the loss."""
    gpu: str
    """Memory of one accelerator, such as 24GB."""
    ram: str
    """Memory of the host, such as 64GB."""
    gpus: int = 1
    """Number of accelerators of the host, used data-parallel."""
    disk: str = "0GB"
    """Space on a local disk for optimizer state, such as 2TB."""
    seq: int = 4096
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences or pictures of a micro-batch on one accelerator."""
    accumulation: int = 1
    """Micro-batches of a step."""
    lora: int = 0
    """Rank of peft's adapters on all linear layers; 0 trains all parameters."""
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """Activation checkpointing, which runs blocks forward again in backward: on, off, or auto for
    the fastest setting that fits."""
    loss: Literal["auto", "model", "chunked"] = "auto"
    """model: the model's own loss. chunked: logits of some tokens at a time, which costs another
    product with the head in backward. auto: the fastest loss that fits."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """sdpa: fused attention. eager: attention that stores its weights."""
    main_params: Literal["exact", "remainder8", "none"] = "exact"
    """exact: the bits of FP32 main params. remainder8: main params of 24 bits, which take 1 byte a
    parameter less. none: only bfloat16 parameters, rounded stochastically. Training with
    remainder8 or none gives other bits than training with FP32 main params."""
    reserve: str = "1GiB"
    """Assumed memory of each accelerator for CUDA, its libraries and rounding."""
    host_reserve: str = "4GiB"
    """Assumed memory of the host for the system and other processes."""
    rates: tuple[float, float, float, float, float] | None = None
    """Five rates of one accelerator in GB/s: the bus up and the bus down while both directions
    are busy, host memory, device memory (reading and writing together), and disk. The default
    assumes a desktop with PCIe 4, two channels of DDR5-5600, and a disk of 3 GB/s."""
    json: bool = False
    """True to print JSON instead of text."""


_UNITS = {"": 30, "G": 30, "GB": 30, "GIB": 30, "T": 40, "TB": 40, "TIB": 40, "MB": 20, "MIB": 20}


def bytes_of(name: str, text: str, *, decimal: bool = False) -> int:
    """Return the bytes of a size such as "24GB".

    Args:
        name: name of the option, for the error.
        text: the size.
        decimal: True if GB are 10**9 bytes, as on a disk.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"--{name} {text}: this is not a size; write a size such as 24GB or 1.5TB")
    power = _UNITS[match[2].upper()]
    is_decimal = decimal and not match[2].upper().endswith("IB")
    return int(float(match[1]) * (1000 ** (power // 10) if is_decimal else 2**power))


def check(options: Options) -> None:
    """Raise ValueError if a number among the options is out of range, or a size is not valid."""
    for name in ("gpus", "seq", "batch", "accumulation"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.lora < 0:
        raise ValueError(f"--lora {options.lora}: must be a rank > 0, or 0 for no adapters")
    if options.rates is not None and not all(0 < rate < math.inf for rate in options.rates):
        raise ValueError(f"--rates {options.rates}: each must be more than 0 GB/s")
    limits_of(options)  # Raises ValueError if a size is not valid.


# -- the model ------------------------------------------------------------------------------------


@dataclass
class Program:
    """A model on the meta device, and the function that returns its loss.

    Attributes:
        model: the model, with adapters if ``lora`` is set.
        loss_of: function from the model to the loss.
        vocabulary: length of the last dimension of logits; None if it is unknown.
        recipe: the model and batch for the printed programs.
        is_hf: True for a model of ``transformers``.
    """

    model: nn.Module
    loss_of: Callable[[nn.Module], Tensor]
    vocabulary: int | None
    recipe: Recipe
    is_hf: bool

    @property
    def base(self) -> Any:
        """The model without adapters."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "peft_config") else model


def shipped() -> dict[str, Any]:
    """Return configs of common models by their name at Hugging Face."""
    text = files("mp_optim.apps.fit").joinpath("models.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def program(options: Options) -> Program:
    """Return the model to train, with its loss.

    Raises:
        ValueError: the model is neither shipped, nor a path, nor a function.
        FileNotFoundError: the file does not exist.
    """
    if ":" in options.model:
        path, _, name = options.model.rpartition(":")
        spec = importlib.util.spec_from_file_location("model_to_fit", path)
        if spec is None or spec.loader is None or not Path(path).exists():
            raise FileNotFoundError(
                f"--model {options.model}: there is no such Python file; write file.py:function"
            )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise ValueError(
                f"--model {options.model}: {path} has no function {name}; correct the name"
            )
        model, loss_of = getattr(module, name)()
        return Program(model, loss_of, None, Recipe(options.model, "AutoModel"), False)
    import transformers

    name = options.model
    if Path(name).exists():
        config = hf_config(Path(name))
    else:
        same, name = named(options.model)
        config = transformers.AutoConfig.for_model(**shipped()[same])
    with model_errors(options.model):
        model = build_hf(config, attention=options.attention, lora=options.lora)
    # The transformers class that loads an architecture such as LlamaForCausalLM or GPT2LMHeadModel.
    architecture = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    auto = f"AutoModelFor{architecture.rpartition('For')[2]}"
    if architecture.endswith("LMHeadModel"):
        auto = "AutoModelForCausalLM"
    recipe = Recipe(
        name,
        auto if hasattr(transformers, auto) else architecture,
        *(options.batch, options.gpus, options.accumulation, options.lora, options.attention),
    )
    loss_of = hf_loss(options.seq, options.batch)
    return Program(model, loss_of, getattr(config, "vocab_size", None), recipe, True)


_TUNED = re.compile(r"(-(hf|instruct|chat|base|it|sft|dpo|v\d+(\.\d+)?|\d{4}))+$")
"""Endings of names that describe a model's training, not its shape."""


def named(model: str) -> tuple[str, str]:
    """Return the shipped name of a model with the same shape, and the model's full name.

    ``Qwen2.5-7B-Instruct`` has the shape and the organization of ``Qwen/Qwen2.5-7B``.

    Raises:
        ValueError: no shipped model has the name; the message lists the nearest names.
    """
    ids = {_last_part(name): name for name in shipped()}
    asked = _last_part(model)
    shapes = {_TUNED.sub("", last): name for last, name in ids.items()}
    found = ids.get(asked) or shapes.get(_TUNED.sub("", asked))
    if found is None:
        near = difflib.get_close_matches(asked, ids, n=3, cutoff=0.5)
        nearest = ", ".join(ids[each] for each in near)
        raise ValueError(
            f"--model {model}: no such file, and no shipped model has this name; "
            + (f"the nearest are {nearest}; " if near else "")
            + f"pass the config.json of the model, or one of {', '.join(shipped())}"
        )
    if "/" in model:
        return found, model
    return found, found if asked in ids else f"{found.partition('/')[0]}/{model}"


def _last_part(name: str) -> str:
    return name.rpartition("/")[2].lower()


# -- settings to try -------------------------------------------------------------------------------

_FORMS: dict[str, tuple[dict[str, str], ...]] = {
    "exact": (
        {},
        {"state": "bf16", "main_params": "remainder16"},
        {"state": "8bit", "main_params": "remainder16"},
    ),
    "remainder8": (
        {"state": "bf16", "main_params": "remainder8"},
        {"state": "8bit", "main_params": "remainder8"},
    ),
    "none": ({"state": "8bit", "main_params": "none"},),
}
"""Settings to try for each ``--main-params``, in order of decreasing bytes."""
_RELEASED = {"offload": 1.0, "offload_mode": "overlap", "release_gradients": True}
_STREAMED = {"offload_place": "streamed"}
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_PATH = "/mnt/nvme"


def candidates(options: Options) -> Iterator[Candidate]:
    """Yield settings in the order in which they are tried.

    The first settings store state on the accelerator. The next settings shard state over ranks,
    store state in compact forms, and move a fraction of the state to the host. The host steps this
    state itself, or the device steps it in windows (streamed), which needs less host memory. The
    last settings store state on a disk. Gradients stay on the accelerator until moving state alone
    is not enough.
    """
    shards = options.gpus > 1
    forms = _FORMS[options.main_params]
    layout = Layout(dp=options.gpus, sharding="fsdp2") if shards else Layout()

    def candidate(words: dict[str, Any]) -> Candidate:
        return Candidate(words, config_of("adam", words), layout)

    if not forms[0]:
        yield Candidate({}, config_of("adam", {}))
        if shards:
            zero = replace(config_of("adam", {}), use_distributed_optimizer=True)
            yield Candidate({}, zero, Layout(dp=options.gpus))
    for words in forms:
        if words or shards:
            yield candidate(words)
    smallest = forms[-1]
    for place in ({}, _STREAMED):
        for offload in _FRACTIONS:
            yield candidate({**smallest, "offload": offload, **place})
    yield candidate({**smallest, **_RELEASED})
    yield candidate({**smallest, **_RELEASED, **_STREAMED})
    if options.disk != Options.disk:
        on_disk = {"optimizer_state_path": _PATH}
        yield candidate({**smallest, **_RELEASED, **_STREAMED, **on_disk})


def ways(options: Options, made: Program) -> list[tuple[bool, str]]:
    """Return pairs (checkpointing, loss) to try, the fastest first."""
    losses = [loss for loss in LOSSES if options.loss in (AUTO, loss)]
    if not (made.is_hf and can_chunk(made.base)):
        losses = ["model"]
    states = {AUTO: [False, True], "on": [True], "off": [False]}[options.checkpointing]
    if not made.is_hf:
        states = [False]
    return [(checkpointing, loss) for checkpointing in states for loss in losses]


def limits_of(options: Options) -> Limits:
    """Return the memory that one rank can use."""
    as_reported = options.gpu.strip().upper().endswith("IB")
    return Limits(
        int(bytes_of("gpu", options.gpu) * (1 if as_reported else SOLD)),
        bytes_of("ram", options.ram) // options.gpus,
        bytes_of("disk", options.disk, decimal=True) // options.gpus,
        bytes_of("reserve", options.reserve),
        bytes_of("host-reserve", options.host_reserve) // options.gpus,
    )


def rates_of(options: Options) -> Machine:
    """Return the assumed rates of a rank's bus, memory and disk."""
    if options.rates is None:
        return DESKTOP
    return Machine("as given", *(rate * GB for rate in options.rates))


def fitted(options: Options) -> tuple[Estimate, Program]:
    """Return the first settings that fit, or the settings with the least missing memory.

    Raises:
        ValueError, TypeError: options contradict each other, or a model cannot be built.
    """
    made = program(options)
    return choose(options, made, candidates(options)), made


def choose(options: Options, made: Program, tried: Iterable[Candidate]) -> Estimate:
    """Return the estimate of the first candidate that fits a program, or of the candidate with
    the least missing memory.

    If two candidates differ only in ``offload_place`` and both fit, the faster one is returned.
    """
    specs, gathered = specs_of(made.model), gathered_bytes(made.model)
    fake, limits, listed = as_fake(made.model), limits_of(options), list(tried)

    @cache
    def traced(checkpointing: bool, loss: str) -> Timeline:
        if made.is_hf:
            checkpoint_blocks(made.model, checkpointing)
        restore = chunk_loss(made.base) if loss == "chunked" else None
        try:
            return trace(made.model, fake, made.loss_of, vocabulary=made.vocabulary)
        finally:
            if restore is not None:
                restore()

    def searched(candidates: list[Candidate], tried_ways: list[tuple[bool, str]]) -> Estimate:
        return search(
            candidates,
            lambda candidate: plan(specs, candidate.config, candidate.layout),
            traced,
            ways=tried_ways,
            limits=limits,
            gathered=gathered,
            accumulates=options.accumulation > 1,
        )

    found = searched(listed, ways(options, made))
    if found.plan.fraction and not found.missing(limits):
        error = 0.0 if found.missing(limits, ERROR) else ERROR
        words = {**found.candidate.words, **_STREAMED}
        for other in listed:
            if other is not found.candidate and {**other.words, **_STREAMED} == words:
                again = searched([other], [(found.checkpointing, found.loss)])
                seconds = [step_seconds(each, rates_of(options)) for each in (again, found)]
                if seconds[0] < seconds[1] and not again.missing(limits, error):
                    found = again
    return found


# -- the answer -----------------------------------------------------------------------------------


def as_data(found: Estimate, options: Options, made: Program) -> dict[str, Any]:
    """Return the answer as plain data; sizes are in bytes.

    ``fits`` is true if the estimate fits. ``certain`` is true if the settings fit even if the
    estimate is too low by ``error``. ``slack`` is the share by which the accelerator's estimate may
    be too low while the settings still fit.
    """
    limits = limits_of(options)
    missing = found.missing(limits)
    layout = dataclasses.asdict(found.candidate.layout)
    return {
        "fits": not missing,
        "certain": not found.missing(limits, ERROR),
        "slack": round(found.slack(limits), 4),
        "error": ERROR,
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
        "optimizer_step_seconds": step_seconds(found, rates_of(options)),
        "assumed": assumptions(options),
        "recipes": recipes(found, made.recipe) if made.is_hf else {},
    }


def assumptions(options: Options) -> list[str]:
    """Return the facts about the machine and the program that the estimate assumes."""
    machine = rates_of(options)
    speeds = [machine.up, machine.down, machine.host, machine.device, machine.disk]
    shown = ", ".join(f"{speed / GB:.0f}" for speed in speeds)
    usable = limits_of(options).device / GIB
    return [
        f"torch can use {usable:.2f} GiB of each accelerator (--gpu {options.gpu}); give GiB "
        "from torch.cuda.mem_get_info() to be exact",
        f"CUDA and libraries take {options.reserve} of each accelerator, other programs "
        f"{options.host_reserve} of the host",
        "operations allocate as torch's CPU operations do in eager mode; the allocator has "
        "expandable segments, as the programs below set them",
        f"GB/s of bus up, bus down, host memory, device memory, disk: {shown} ({machine.name}); "
        "no part of the optimizer's step is hidden behind backward",
        f"published peaks are up to {ERROR:.0%} above the estimate (docs/fit.md)",
        "predicted: the recipes of mp-optim fit have not run on a GPU",
    ]


def report(found: Estimate, options: Options, made: Program) -> str:
    """Return the answer as text."""
    limits = limits_of(options)
    words = [f"{name}={value!r}" for name, value in found.candidate.words.items()]
    if found.candidate.config.is_distributed:
        words.append("use_distributed_optimizer=True")
    if found.candidate.layout.sharding == "fsdp2":
        words.append(f"FSDP2 over {found.candidate.layout.dp} ranks")
    words.append("blocks checkpointed" if found.checkpointing else "no checkpointing")
    words.append("chunked loss" if found.loss == "chunked" else "the model's own loss")
    lines = [verdict(found, limits), "", f"settings: {', '.join(words)}"]
    names = list(dict.fromkeys(name for sizes in found.moments.values() for name in sizes))
    heads = "".join(f"{moment:>12}" for moment in found.moments)
    lines += ["", f"{'GiB per accelerator':24}{heads}"]
    for name in names:
        sizes = [of.get(name, 0) for of in found.moments.values()]
        if any(sizes):
            lines.append(f"{name:24}" + "".join(f"{size / GIB:12.2f}" for size in sizes))
    totals = [sum(of.values()) for of in found.moments.values()]
    lines.append(f"{'total':24}" + "".join(f"{size / GIB:12.2f}" for size in totals))
    host = f"host: {found.plan.host_total / GIB:.2f} GiB for each accelerator"
    saving = found.plan.background_save / GIB
    lines += ["", f"{host}, and {saving:.2f} more during a background save"]
    if found.plan.disk.total:
        lines.append(f"disk: {found.plan.disk.total / GIB:.2f} GiB for each accelerator")
    lines.append(f"optimizer's step: {step_seconds(found, rates_of(options)):.2f} s (modelled)")
    lines += ["", "assumed:", *(f"- {each}" for each in assumptions(options))]
    if made.is_hf:
        for name, text in recipes(found, made.recipe).items():
            lines += ["", f"# {name}", text]
    return "\n".join(lines)


def verdict(found: Estimate, limits: Limits) -> str:
    """Return the answer in one sentence."""
    missing = found.missing(limits)
    if missing:
        lacks = ", ".join(f"{size / GIB:.2f} GiB of {name}" for name, size in missing.items())
        return f"does not fit: the closest of all settings lacks {lacks}"
    free = f"{(limits.device - found.device) / GIB:.2f} GiB of each accelerator"
    moment = f"in {found.moment}, the fullest moment"
    if found.missing(limits, ERROR):
        return (
            f"fits if the estimate is at most {found.slack(limits):.1%} too low (it may be "
            f"{ERROR:.0%}): {free} stay free {moment}"
        )
    return f"fits: {free} stay free {moment}, enough for an estimate that is {ERROR:.0%} too low"


def main(arguments: Sequence[str]) -> int:
    """Run a command line, and return the exit status: 0 if the estimate fits, 3 if not."""
    options = tyro.cli(Options, args=arguments, prog="mp-optim fit", description=__doc__)
    check(options)
    found, made = fitted(options)
    if options.json:
        print(json.dumps(as_data(found, options, made), indent=2))
    else:
        print(report(found, options, made))
    return 3 if found.missing(limits_of(options)) else 0
