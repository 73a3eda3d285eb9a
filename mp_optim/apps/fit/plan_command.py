"""Plan of the memory of a model and its optimizer on one rank, without allocating it.

$ mp-optim plan --model path/to/config.json --dp 8 --ep 8 --gpu-memory 80
$ mp-optim plan --model path/to/config.json --gpu-memory 24 --state 8bit --release-gradients
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mp_optim import OptimizerConfig
from mp_optim.apps.cli.command import console, hf_config, model_errors
from mp_optim.apps.fit.model_plan import Layout, smallest_fraction, specs_of
from mp_optim.apps.fit.model_plan import plan as plan_model
from mp_optim.config.state_forms import MOMENT_WORDS, REMAINDERS
from mp_optim.factory.memory_plan import MemoryPlan, with_defaults
from mp_optim.factory.offload_fraction import OFFLOADING, with_fraction
from mp_optim.optimizers.settings import config_of

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
FORMS: Mapping[str, Mapping[str, Any]] = {
    "FP32": {},
    **{
        f"{words} moments, remainders": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": dtype,
            "exp_avg_sq_dtype": dtype,
        }
        for words, dtype in (("bf16", "bfloat16"), ("8-bit", "uint8"))
    },
}
"""Storage formats of optimizer state by name, as fields of the config."""
_FORM = (
    "use_precision_aware_optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp32_state_below",
    "store_param_remainders",
    "param_remainder_bits",
)
"""Fields of the config that determine the storage format of state."""
Gibibytes = Annotated[float | None, tyro.conf.arg(metavar="GIB")]


@dataclass
class Options:
    """Model, settings and limits of a plan. Memory is in GiB (2**30 bytes) on one rank."""

    model: Path
    """A Hugging Face config.json, or the folder that contains it."""
    optimizer: Path | None = None
    """A YAML file with fields of OptimizerConfig. Without a file the optimizer is AdamW for
    bf16."""
    state: Literal["fp32", "bf16", "fp16", "8bit", "4bit"] | None = None
    """Storage format of the moments. This option and the next three are arguments of
    mp_optim.AdamW."""
    main_params: Literal["fp32", "remainder16", "remainder8", "none"] | None = None
    """Storage format of the main params of bf16 parameters."""
    offload_mode: Literal["sync", "overlap", "speculative"] | None = None
    """sync: the host begins in step(). overlap: gradients are copied to the host during
    backward. speculative: the host also steps parameters during backward."""
    release_gradients: bool = False
    """True to free gradients on the accelerator during backward. The default of offload-mode is
    then overlap."""
    layout: tyro.conf.OmitArgPrefixes[Layout] = field(default_factory=Layout)
    gpu_memory: Gibibytes = None
    """GiB of the accelerator to use. The command then finds the smallest offload fraction that
    fits."""
    host_memory: Gibibytes = None
    """GiB of the host for this rank."""


def config_from(options: Options) -> OptimizerConfig:
    """Return the optimizer's config, from a YAML file or from optimizer class arguments.

    Raises:
        ValueError: the file has other content, or settings contradict each other.
    """
    given = {
        "state": options.state,
        "main_params": options.main_params,
        "offload_mode": options.offload_mode or ("overlap" if options.release_gradients else None),
        "release_gradients": options.release_gradients or None,
    }
    words: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.optimizer is None:
        return config_of("adam", words | ({"offload": 1.0} if "offload_mode" in words else {}))
    if words:
        passed = ", ".join(
            "--" + name.replace("_", "-") for name in given if getattr(options, name)
        )
        raise ValueError(
            f"--optimizer {options.optimizer} sets the whole config, so these options cannot be "
            f"combined with it: {passed}; leave out either these options or --optimizer"
        )
    import yaml

    try:
        settings = yaml.safe_load(options.optimizer.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ValueError(
            f"--optimizer {options.optimizer} is not YAML: {where}; correct the file"
        ) from error
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"--optimizer {options.optimizer}: must hold fields of OptimizerConfig, such as "
            "lr: 1.0e-4"
        )
    settings = dict(settings)
    # Fields of offloading need offloading, so turn it on. Each line of the table replaces the
    # fraction, so any fraction serves here.
    if not OFFLOADING.isdisjoint(settings):
        settings.setdefault("optimizer_cpu_offload", True)
        settings.setdefault("optimizer_offload_fraction", 1.0)
    return OptimizerConfig.from_dict(settings)


def form_of(config: OptimizerConfig) -> str:
    """Return the name of a config's storage format of optimizer state."""
    dtypes = dict.fromkeys((config.exp_avg_dtype, config.exp_avg_sq_dtype))
    moments = " and ".join(MOMENT_WORDS[dtype] for dtype in dtypes)
    if config.keeps_remainders:
        return f"{moments} moments, {REMAINDERS[config.param_remainder_bits].words}"
    return "FP32" if moments == "FP32" else f"{moments} moments"


def table(rows: list[tuple[str, MemoryPlan]], options: Options) -> Table:
    """Return a table with one line for each plan; plans that do not fit are red."""
    from rich.table import Table

    layout = options.layout
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "ep"))
    shown = Table(title=f"GiB per rank: {options.model.stem}, {sizes}, {layout.sharding}")
    shown.add_column("state")
    has_disk = any(plan.disk.total for _, plan in rows)
    places = ["accelerator", "pinned host", "pageable host", *(["disk"] if has_disk else [])]
    for head in ("fraction", *(f"{place}, GiB" for place in (*places, "host", "saving"))):
        shown.add_column(head, justify="right")
    for form, plan in rows:
        held = [plan.accelerator.total, plan.pinned_host.total, plan.pageable_host.total]
        held += [plan.disk.total] if has_disk else []
        cells = [f"{size / GIB:.2f}" for size in (*held, plan.host_total, plan.background_save)]
        if options.gpu_memory is not None and held[0] > options.gpu_memory * GIB:
            cells[0] = f"[red]{cells[0]}[/red]"
        shown.add_row(form, f"{plan.fraction:g}", *cells)
    return shown


def main(arguments: Sequence[str]) -> int:
    """Run a command line, and return the exit status."""
    options = tyro.cli(Options, args=arguments, prog="mp-optim plan", description=__doc__)
    config, source = config_from(options), hf_config(options.model)
    with model_errors(str(options.model)):
        specs = specs_of(source)
    out = console()
    own = form_of(config)
    configs = {own: config}
    if not (options.state or options.main_params):
        configs = {} if own in FORMS else configs
        for name, form in FORMS.items():
            # Leave out a format that the rule does not support, for which with_defaults() raises.
            with suppress(ValueError):
                configs[name] = config if name == own else with_defaults(config, _FORM, **form)
    rows = [
        (name, plan_model(specs, with_fraction(in_form, fraction), options.layout))
        for name, in_form in configs.items()
        for fraction in FRACTIONS
    ]
    billions = sum(spec.numel for spec in specs) / 1e9
    out.print(f"{billions:.2f} B params in {len(specs)} tensors", highlight=False)
    out.print(table(rows, options))
    out.print(
        "pinned host: page-locked memory; saving: additional host memory during a background save"
    )
    if options.gpu_memory is not None:
        smallest = smallest_fraction(
            specs,
            config,
            options.layout,
            gpu_memory=int(options.gpu_memory * GIB),
            host_memory=None if options.host_memory is None else int(options.host_memory * GIB),
        )
        print(
            f"{own}: optimizer_offload_fraction={smallest.fraction:g} (offload="
            f"{smallest.fraction:g}) is the smallest that fits {options.gpu_memory:g} GiB:\n"
            f"{smallest}"
        )
    return 0
