"""Classification of parameters into embeddings, output layers and hidden matrices.

Muon orthogonalizes only hidden matrices.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from mp_optim.config import OptimizerConfig
from mp_optim.core.names import named_params
from mp_optim.core.param_attributes import shard_info
from mp_optim.host.calls import warn

# -- embeddings and output layers -----------------------------------------------------------------

_TABLE_WORDS = {"emb", "embs", "embed", "embeds", "embedding", "embeddings"}
_TABLE_NAMES = {"wte", "wpe", "relative_attention_bias"}
_ANYWHERE = {"embed_tokens", "word_embeddings", "lm_head", "output_layer", "embed_out", "to_logits"}
"""Components of a parameter name (FQN) that mark an embedding or output layer at any position."""
_OUTSIDE_BLOCKS = (
    *("shared", "output", "head", "head.fc", "score", "qa_outputs"),
    *("classifier", "classifier.dense", "classifier.out_proj"),
)
"""Ends of an FQN that mark an embedding or output layer, if no component of the FQN is a number.
A number marks a layer inside a block."""


class Tables:
    """Registry of the embeddings and output layers of some modules.

    If a parameter has Megatron's attribute ``is_embedding_or_output_parameter``, the attribute
    decides. Otherwise the modules that hold the parameter decide: ``nn.Embedding`` and similar
    classes, and the module from Hugging Face's ``get_output_embeddings()``. The name decides last.

    Args:
        chunks: modules to search; without modules, attributes and names decide.
    """

    def __init__(self, chunks: Sequence[nn.Module] = ()) -> None:
        self._names: dict[int, str] = {}
        for chunk in chunks:
            self._names = {id(param): name for name, param in named_params([chunk])} | self._names
        self._why: dict[int, str] = {}
        self._products: set[int] = set()
        for module in (module for chunk in chunks for module in chunk.modules()):
            own = [id(param) for param in module.parameters(recurse=False)]
            is_product = any(
                "Linear" in base.__name__ or base.__name__.startswith("Conv")
                for base in type(module).__mro__
            )
            is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or (
                "Embedding" in type(module).__name__ and not is_product
            )
            if own and is_lookup:
                self._why.update(dict.fromkeys(own, f"in {type(module).__name__}"))
            elif own and is_product:
                self._products.update(own)
            output = None
            # get_output_embeddings() of a transformers class without a head raises one of these
            # errors; then the module has no output layer.
            with suppress(AttributeError, NotImplementedError):
                output = getattr(module, "get_output_embeddings", lambda: None)()
            for param in output.parameters(recurse=False) if isinstance(output, nn.Module) else ():
                self._why.setdefault(id(param), "in the output layer")

    def name_of(self, param: Tensor, default: str) -> str:
        """Return a parameter's FQN in the modules, or ``default`` if no module holds the
        parameter."""
        return self._names.get(id(param), default)

    def why(self, param: Tensor, name: str) -> str | None:
        """Return the reason why a parameter is an embedding or output layer, or None if it is
        neither.

        Args:
            param: parameter to classify.
            name: name of the parameter, used if no module holds the parameter.
        """
        marked = getattr(param, "is_embedding_or_output_parameter", None)
        if marked is not None:
            return "is_embedding_or_output_parameter" if marked else None
        if reason := self._why.get(id(param)):
            return reason
        # Neither attributes nor modules decide, so compare with the names of common model families.
        parts = self.name_of(param, name).split(".")
        path = [part for part in parts if part not in ("weight", "bias") and not part.isdigit()]
        called, last = "." + ".".join(path), path[-1] if path else ""
        is_in_block = any(part.isdigit() for part in parts)
        is_outside = not is_in_block and any(called.endswith(f".{end}") for end in _OUTSIDE_BLOCKS)
        is_lookup = last in _TABLE_NAMES or bool(_TABLE_WORDS & set(last.split("_")))
        if _ANYWHERE & set(parts) or is_outside:
            return "by name"
        # The weight of a matrix product (Linear, Conv) is no embedding, whatever its name.
        return "by name" if is_lookup and id(param) not in self._products else None


def module_of(params: Any) -> nn.Module | None:
    """Return the module that a ``named_parameters()`` or ``parameters()`` generator belongs to.

    Args:
        params: first argument of an optimizer class.

    Returns:
        The module; None for any other iterable, or a generator that has yielded already.
    """
    if (
        not isinstance(params, GeneratorType)
        or inspect.getgeneratorstate(params) != inspect.GEN_CREATED
    ):
        return None
    if params.gi_code.co_name not in ("named_parameters", "parameters"):
        return None
    owner = inspect.getgeneratorlocals(params).get("self")
    return owner if isinstance(owner, nn.Module) else None


# -- Muon -----------------------------------------------------------------------------------------


def _whole_shape(param: Tensor) -> torch.Size:
    """Return the shape of the whole parameter; a flat shard has the shape in its attributes."""
    whole = shard_info(param).whole_shape
    return param.shape if whole is None else whole


def is_hidden_matrix(param: Tensor, name: str, is_expert: bool, tables: Tables) -> bool:
    """True if Muon steps a parameter by default.

    Muon steps a matrix or a 3-D stack of expert matrices that is neither an embedding nor an output
    layer. An attribute ``use_muon=False`` excludes a parameter.

    Args:
        param: parameter to classify.
        name: FQN of the parameter.
        is_expert: True for an expert parameter.
        tables: embeddings and output layers of the model.
    """
    dims = len(_whole_shape(param))
    return (
        (dims == 2 or (dims == 3 and is_expert))
        and getattr(param, "use_muon", True)
        and tables.why(param, name) is None
    )


_TABLE_ROWS, _TABLE_RATIO = 1024, 8
"""Least number of rows, and least ratio of rows to columns, of a matrix that may be an embedding or
output layer with an unusual name."""


def warn_of_table_shape(param: Tensor, name: str) -> None:
    """Warn if a matrix that Muon steps has the shape of an embedding or output layer.

    Args:
        param: matrix that Muon steps.
        name: FQN of the matrix; names with numbers are skipped, because a number marks a block.
    """
    shape = _whole_shape(param)
    is_tall = len(shape) == 2 and shape[0] >= max(_TABLE_ROWS, _TABLE_RATIO * shape[1])
    if is_tall and not any(part.isdigit() for part in name.split(".")):
        warn(
            f"Muon orthogonalizes {name}: its shape {tuple(shape)} is typical of an embedding or "
            "output layer, but its module and name are not; if the layer is an embedding or "
            'output layer, set optimizer="adam" in the group of this parameter, or in an '
            "override of get_megatron_optimizer"
        )


def choice_notes(param_groups: Iterable[Mapping[str, Any]], tables: Tables) -> tuple[str, ...]:
    """Return lines for ``describe()``: the matrices that Muon orthogonalizes, and all other
    matrices with reasons.

    Args:
        param_groups: groups with ``optimizer`` set.
        tables: embeddings and output layers of the model.
    """
    by_muon: Counter[str] = Counter()
    others: dict[str, Counter[str]] = {}
    for group in param_groups:
        rule = group.get("optimizer", "muon")
        names = group.get("param_names") or [f"unnamed {tuple(p.shape)}" for p in group["params"]]
        for name, param in zip(names, group["params"], strict=True):
            # A star for each number makes the names of all layers equal.
            pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
            if rule == "muon":
                by_muon[pattern] += 1
            elif len(_whole_shape(param)) > 1:
                reason = tables.why(param, name) or "by its group, use_muon, or its dimensions"
                others.setdefault(rule, Counter())[f"{pattern} ({reason})"] += 1
    lines = [f"orthogonalized by Muon: {_listed(by_muon)}"]
    lines += [f"matrices stepped by {rule}: {_listed(names)}" for rule, names in others.items()]
    return tuple(lines)


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.items()) or "none"


class MuonAssignment:
    """Assignment of a model's parameters to muon or its scalar rule, and splits of QKV weights.

    Args:
        model_chunks: modules that hold the parameters.
        config: config with ``optimizer="muon"``.
        tables: embeddings and output layers of these modules.
    """

    def __init__(
        self, model_chunks: Sequence[nn.Module], config: OptimizerConfig, tables: Tables
    ) -> None:
        self._config, self._tables = config, tables
        self._sizes: dict[int, Any] = {}
        for chunk in model_chunks:
            sizes = getattr(chunk, "config", None)
            self._sizes |= dict.fromkeys(map(id, chunk.parameters()), sizes)

    def settings(
        self, param: Tensor, name: str, is_expert: bool, override: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the override of a parameter with ``optimizer`` added.

        A fused QKV weight also gets ``qkv_split_shapes``.

        Args:
            param: parameter to assign.
            name: FQN of the parameter.
            is_expert: True for an expert parameter.
            override: settings for the parameter.

        Raises:
            ValueError: the split of a fused QKV weight is unknown or does not fit its rows, or an
                override assigns muon to a parameter that is not a matrix.
        """
        is_hidden = is_hidden_matrix(param, name, is_expert, self._tables)
        own = "muon" if is_hidden else self._config.muon_scalar_optimizer
        chosen = override.get("optimizer", own)
        if chosen != "muon":
            return {**override, "optimizer": chosen}
        if "optimizer" not in override:
            warn_of_table_shape(param, self._tables.name_of(param, name))
        shape = _whole_shape(param)
        if len(shape) < 2:
            raise ValueError(
                f"{name} has shape {tuple(shape)}: muon steps only matrices; remove the override "
                "optimizer='muon'"
            )
        parts = override.get("qkv_split_shapes", self._qkv_parts(param, name))
        if parts is None:
            return {**override, "optimizer": chosen}
        if (height := shape[-2]) % sum(parts):
            raise ValueError(
                f"{name} has {height} rows, which are not a multiple of the sum of "
                f"qkv_split_shapes={parts}; correct qkv_split_shapes"
            )
        return {**override, "optimizer": chosen, "qkv_split_shapes": parts}

    def _qkv_parts(self, param: Tensor, name: str) -> tuple[int, ...] | None:
        """Return the numbers of rows per query group of a fused QKV weight in Megatron's layout.

        The rows are of queries, of the gate if the model has a gate, of keys and of values. None
        means that the parameter is not fused, or that the config does not split fused weights.
        """
        fused = getattr(param, "is_qkv", False) or name.endswith("linear_qkv.weight")
        if not self._config.muon_split_qkv or not fused:
            return None
        if (parts := getattr(param, "qkv_split_shapes", None)) is not None:
            return tuple(map(int, parts))
        sizes = self._sizes.get(id(param))
        heads, groups, width = (
            getattr(sizes, field, None)
            for field in ("num_attention_heads", "num_query_groups", "kv_channels")
        )
        if not heads or not groups or not width:
            raise ValueError(
                f"{name} is a fused QKV weight and muon_split_qkv=True, but the model's config "
                "lacks its layout (num_attention_heads, num_query_groups, kv_channels); override "
                "qkv_split_shapes=(rows of Q, of K, of V in each group), or set "
                "muon_split_qkv=False"
            )
        queries = heads // groups * width
        gate = (queries,) if getattr(sizes, "attention_output_gate", False) else ()
        return (queries, *gate, width, width)
