"""Four gloo processes that move a checkpoint of a Megatron GPT through several layouts."""

import warnings
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mp_optim import OptimizerConfig, ProcessGroups, checkpoint, get_megatron_optimizer
from mp_optim.apps.cli.inspect import compare
from mp_optim.checkpoint import FlatShard
from mp_optim.checkpoint.reading import open_checkpoint
from support.as_rank import as_rank

warnings.filterwarnings("ignore")
warnings.filterwarnings("error", message=".*not have the values of the loaded main")
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]

ZERO = {"use_distributed_optimizer": True}
HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp 2, zero": ({"tp": 2}, {**ZERO, **HOST}),
    "pp 2, virtual, zero": ({"pp": 2, "virtual": 2}, ZERO),
    "tp 2, ep 2": ({"tp": 2, "ep": 2, "expert_tp": 1}, ZERO),
}


def enter(sizes: dict[str, int]) -> ProcessGroups:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        sizes.get("tp", 1),
        sizes.get("pp", 1),
        sizes.get("virtual"),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("expert_tp"),
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return ProcessGroups.from_attributes(groups)


def build(
    sizes: dict[str, int], settings: dict[str, Any], groups: ProcessGroups
) -> tuple[list[nn.Module], Any]:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_layer_freq=[0, 1, 0, 1],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        virtual_pipeline_model_parallel_size=sizes.get("virtual"),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("expert_tp"),
    )
    torch.manual_seed(3)
    stages = range(sizes["virtual"]) if "virtual" in sizes else [None]
    chunks = [_chunk(config, stage) for stage in stages]
    ours = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=0.0, **settings)
    return chunks, get_megatron_optimizer(
        ours, chunks, process_groups=groups, expert_predicate=is_expert
    )


def is_expert(param: Any, name: str) -> bool:
    return not getattr(param, "allreduce", True)


def _chunk(config: TransformerConfig, stage: int | None) -> nn.Module:
    where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage}
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    model = GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=True,
        vp_stage=stage,
    )
    return model.bfloat16()


def train(chunks: list[nn.Module], optimizer: Any, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for chunk in chunks:
            for param in chunk.parameters():
                param.grad = torch.sin(7.0 * param.detach().float()).to(param.dtype)
        assert optimizer.step().success


def snapshot(chunks: list[nn.Module], optimizer: Any) -> dict[str, Tensor]:
    result = {}
    for index, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            result[f"{index}.{name}"] = param.detach().clone()
            for key, value in optimizer.state[param].items():
                part = value.local if isinstance(value, FlatShard) else value
                result[f"{index}.{name}.{key}"] = part.clone()
    return result


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def whole_name(part: ShardedTensor) -> str:
    name = part.key
    stacked = [part.global_offset[axis] for axis in range(part.prepend_axis_num)]
    if stacked and "decoder.layers." in name and not name.split(".")[2].isdigit():
        name = name.replace("decoder.layers.", f"decoder.layers.{stacked.pop(0)}.", 1)
    if stacked:
        name = name.replace(".experts.experts.", f".experts.local_experts.{stacked.pop(0)}.")
    assert not stacked, part
    return name


def out_of_place(chunks: list[nn.Module], path: Path) -> tuple[int, list[str]]:
    saved = open_checkpoint(path)
    count, wrong = 0, []
    for part in (part for chunk in chunks for part in parts_of(chunk)):
        name = whole_name(part)
        if "layer_norm_" in name:  # Megatron assigns this norm to the layer after it.
            continue
        axes = part.prepend_axis_num
        whole = saved.read(f"model.{name}")
        for dim, (first, length) in enumerate(
            zip(part.global_offset[axes:], part.local_shape, strict=True)
        ):
            whole = whole.narrow(dim, first, length)
        count += 1
        if not torch.equal(whole, part.data):
            wrong.append(name)
    return count, wrong


def parts_of(chunk: nn.Module) -> list[ShardedTensor]:
    tree: Any = chunk.sharded_state_dict()
    apply_factories(tree)
    found: list[ShardedTensor] = []
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, ShardedTensor):
            found.append(value)
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return found


def through(name: str, root: Path, previous: Path) -> list[Any]:
    sizes, settings = LAYOUTS[name]
    groups, origin = enter(sizes), root / "origin"
    layout = sizes, settings, groups
    chunks, optimizer = build(*layout)
    if name == "one":
        train(chunks, optimizer)
        checkpoint.save(origin, chunks, optimizer)
    checkpoint.load(previous, chunks, optimizer)
    count, wrong = out_of_place(chunks, origin)
    checkpoint.save(root / name, chunks, optimizer)
    differing = [
        f"{entry.name}: {entry.what}"
        for entry in compare(open_checkpoint(origin), open_checkpoint(root / name))
        if entry.what != "equal"
    ]
    train(chunks, optimizer)
    other = build(*layout)
    checkpoint.load(root / name, *other)
    train(*other)
    return [count, wrong, differing, same(snapshot(*other), snapshot(chunks, optimizer))]


def main(folder: Path) -> Any:
    root, previous = folder, folder / "origin"
    result: dict[str, Any] = {}
    for name in LAYOUTS:
        result[name] = through(name, root, previous)
        previous = root / name
    return result


if __name__ == "__main__":
    as_rank(main)
