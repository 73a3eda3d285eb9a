"""Memory of a forward and a backward pass, counted with fake tensors.

Fake tensors have shapes and no data. Every storage that operations allocate is counted.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ROUNDING = 512
LARGE, LARGE_ROUNDING = 10 << 20, 2 << 20


def allocated_bytes(size: int) -> int:
    """Return the bytes that torch's CUDA allocator takes for a storage of ``size`` bytes.

    The result is a multiple of 512 bytes, and from 10 MiB on a multiple of 2 MiB
    (``c10/cuda/CUDACachingAllocator.cpp``).
    """
    unit = LARGE_ROUNDING if size >= LARGE else ROUNDING
    return math.ceil(size / unit) * unit


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment of forward or backward.

    Attributes:
        phase: "forward" or "backward".
        activations: bytes of tensors saved for backward, of temporary tensors of an operation, and
            of logits.
        logits: bytes of activations that have the vocabulary as last dimension.
        grads: bytes of gradients that backward has computed.
    """

    phase: str
    activations: int
    logits: int
    grads: int


@dataclass
class Timeline:
    """Bytes after every operation of a step that allocates memory.

    Attributes:
        moments: moments in order.
        buffers: bytes of the model's buffers.
        grads: bytes of all gradients.
    """

    moments: list[Moment] = field(default_factory=list)
    buffers: int = 0
    grads: int = 0

    def peak(self, held: Callable[[int], int] = lambda grads: grads) -> Moment:
        """Return the moment with the largest sum of activations and gradients.

        Args:
            held: function from the bytes of all gradients that backward has computed to the bytes
                of gradients on the device. The result replaces ``grads`` of the returned moment.
        """
        found = max(self.moments, key=lambda each: each.activations + held(each.grads))
        return Moment(found.phase, found.activations, found.logits, held(found.grads))


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the storages that operations allocate and free.

    Args:
        rounded: function from the bytes of a storage to the bytes that the allocator takes for it.
        vocabulary: length of the last dimension of logits.
        known: existing storages, which are not counted.
    """

    def __init__(
        self, rounded: Callable[[int], int], vocabulary: int | None, known: Sequence[Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self.phase = "forward"
        self._rounded, self._vocabulary = rounded, vocabulary
        # Storages are counted by id. Keep references to the known storages, so that no new storage
        # gets the id of a freed storage.
        self._known = known
        self._live: dict[int, tuple[str, int]] = {id(storage): ("known", 0) for storage in known}
        self.bytes = {"known": 0, "activations": 0, "logits": 0, "grads": 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        before = len(self._live)
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._see(value)
        if len(self._live) > before:
            self._note()
        return out

    def _see(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        if id(storage) in self._live or value.device.type == "meta":
            return
        is_logits = value.dim() > 0 and value.shape[-1] == self._vocabulary
        kind = "logits" if is_logits else "activations"
        size = self._rounded(storage.nbytes())
        self._live[id(storage)] = kind, size
        self.bytes[kind] += size
        weakref.finalize(storage, self._free, id(storage))

    def _free(self, key: int) -> None:
        kind, size = self._live.pop(key)
        self.bytes[kind] -= size

    def _note(self) -> None:
        sizes = self.bytes
        live = sizes["activations"] + sizes["logits"]
        self.timeline.moments.append(Moment(self.phase, live, sizes["logits"], sizes["grads"]))

    def gradient_is_there(self, param: Tensor) -> None:
        """Count a parameter's new gradient as a gradient, no longer as an activation."""
        assert param.grad is not None
        key = id(param.grad.untyped_storage())
        kind, size = self._live.get(key, ("known", 0))
        if kind in ("activations", "logits"):
            self._live[key] = "grads", size
            self.bytes[kind] -= size
            self.bytes["grads"] += size
            self._note()


def track(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    rounded: Callable[[int], int] = allocated_bytes,
    vocabulary: int | None = None,
) -> Timeline:
    """Run forward and backward once, and count the memory that operations allocate.

    Args:
        model: a model without gradients, with real or fake tensors. The model has gradients
            afterwards.
        loss_of: function from the model to the loss. The function creates the inputs, which are
            counted.
        rounded: function from the bytes of a storage to the bytes that the allocator takes for it.
        vocabulary: length of the last dimension of logits, by which logits are found.
    """
    tensors = [*model.parameters(), *model.buffers()]
    tracker = Tracker(rounded, vocabulary, [each.untyped_storage() for each in tensors])
    trained: list[Any] = [param for param in model.parameters() if param.requires_grad]
    hooks = [
        param.register_post_accumulate_grad_hook(tracker.gradient_is_there) for param in trained
    ]
    # Fused GPU kernels generate the dropout mask again in backward, so they store no mask. The CPU
    # kernel does not support dropout, so torch would use attention that stores its weights. A
    # TorchFunctionMode would not apply to forwards that checkpointing runs again.
    name = "scaled_dot_product_attention"
    attention: Any = getattr(nn.functional, name)

    def without_dropout(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            return attention(*args[:4], 0.0, *args[5:], **kwargs)
        return attention(*args, **{**kwargs, "dropout_p": 0.0})

    try:
        with tracker, patch.object(nn.functional, name, without_dropout):
            loss = loss_of(model)
            tracker.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    finally:
        for hook in hooks:
            hook.remove()
    timeline = tracker.timeline
    timeline.grads = tracker.bytes["grads"]
    timeline.buffers = sum(rounded(buffer.nbytes) for buffer in model.buffers())
    return timeline


def trace(
    model: nn.Module,
    fake: FakeTensorMode,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    vocabulary: int | None = None,
) -> Timeline:
    """Return the memory that a forward and a backward would take on an accelerator. No accelerator
    is used.

    The operations are the CPU's, on fake tensors. Attention is fused, as on a GPU. Temporary memory
    of kernels is not counted.

    Args:
        model: a model with fake tensors of :func:`as_fake`; it has no gradients afterwards.
        fake: result of :func:`as_fake`.
        loss_of: function from the model to the loss. The function creates the inputs.
        vocabulary: length of the last dimension of logits.
    """
    with fake:
        try:
            return track(model, loss_of, vocabulary=vocabulary)
        finally:
            model.zero_grad()


def as_fake(model: nn.Module) -> FakeTensorMode:
    """Replace parameters and buffers of a model by fake CPU tensors, and return their fake mode.

    Tied tensors are replaced by one tensor.
    """
    fake = FakeTensorMode()
    made: dict[int, nn.Parameter] = {}
    # Replacements are found by the id of the replaced tensor. Keep references to the replaced
    # parameters, so that no other tensor gets their ids.
    originals = list(model.parameters())
    with fake:
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    if id(param) not in made:
                        made[id(param)] = nn.Parameter(_empty(param), param.requires_grad)
                    module._parameters[name] = made[id(param)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _empty(buffer)
    del originals
    return fake


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


# -- models of transformers -----------------------------------------------------------------------


LOSSES = ("model", "chunked")
"""Kinds of loss: the model's own loss, or a loss that computes logits for some tokens at a time
(:func:`~mp_optim.apps.fit.chunked_loss.chunk_loss`)."""


def build_hf(config: Any, *, attention: str = "sdpa", lora: int = 0) -> nn.Module:
    """Build the model of a ``transformers`` config on the meta device, in training mode.

    Args:
        config: config of the model.
        attention: "sdpa" for fused attention, or "eager", which stores attention weights.
        lora: rank of peft's adapters on all linear layers; 0 trains all parameters.

    Raises:
        ValueError: transformers has no class with the config's name.
    """
    import transformers

    dtype = getattr(config, "dtype", None) or torch.bfloat16
    names = getattr(config, "architectures", None) or ()
    known: Any = next((getattr(transformers, name, None) for name in names), None)
    if names and known is None:
        raise ValueError(
            f"architectures={list(names)!r}: transformers {transformers.__version__} has no such "
            "model; pass --model file.py:function, a function that builds the model"
        )
    config._attn_implementation = attention
    made = known or transformers.AutoModelForCausalLM
    build = getattr(made, "_from_config", None) or made.from_config
    with torch.device("meta"):
        try:
            model: Any = build(config, dtype=dtype)
        except ValueError as reason:
            if "attention implementation" not in str(reason):
                raise
            raise ValueError(
                f"attention={attention!r}: transformers has no fused attention for this model; "
                "use --attention eager"
            ) from reason
        if lora:
            import peft

            adapters = peft.LoraConfig(r=lora, target_modules="all-linear")
            model = peft.get_peft_model(model, adapters)
    return model.train()  # type: ignore[no-any-return]


def checkpoint_blocks(model: Any, on: bool = True) -> None:
    """Turn activation checkpointing of a ``transformers`` model's blocks on or off.

    Raises:
        ValueError: the model's class does not support activation checkpointing.
    """
    how = {"use_reentrant": False, "preserve_rng_state": False}
    with warnings.catch_warnings():
        # Newer versions of transformers warn that these methods are deprecated, but only these
        # methods exist in all versions.
        warnings.simplefilter("ignore", FutureWarning)
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        else:
            model.gradient_checkpointing_disable()


def hf_loss(seq: int, size: int = 1) -> Callable[[nn.Module], Tensor]:
    """Return a function that computes the loss of a ``transformers`` model for a micro-batch.

    Args:
        seq: tokens of a sequence; not used for pictures, which have the size in the model's config.
        size: number of sequences or pictures.

    Raises:
        ValueError: the model's input is neither tokens nor pictures.
    """

    def loss_of(model: Any) -> Tensor:
        from transformers import masking_utils

        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        if inner.main_input_name == "pixel_values":
            config, dtype = inner.config, next(model.parameters()).dtype
            shape = (size, config.num_channels, config.image_size, config.image_size)
            pixels = torch.zeros(shape, dtype=dtype, device="cpu")
            labels = torch.zeros(size, dtype=torch.long, device="cpu")
            given: dict[str, Any] = {"pixel_values": pixels, "labels": labels}
        elif inner.main_input_name == "input_ids":
            _check_positions(inner, seq)
            tokens = torch.zeros((size, seq), dtype=torch.long, device="cpu")
            no_cache = {"use_cache": False} if hasattr(inner.config, "use_cache") else {}
            labels = tokens[:, 0] if "SequenceClassification" in type(inner).__name__ else tokens
            given = {"input_ids": tokens, "labels": labels, **no_cache}
        else:
            raise ValueError(
                f"{type(inner).__name__} takes {inner.main_input_name}, but only input_ids and "
                "pixel_values can be made up; pass --model file.py:function, a function that "
                "returns the model and a function that computes its loss"
            )
        # Tell transformers that each row is one sequence, as with real data. transformers cannot
        # read this from fake tensors, and would allocate masks that training does not have. A mock
        # would keep its arguments, and so the memory of a tensor.
        name = "find_packed_sequence_indices"
        with patch.object(masking_utils, name, lambda position_ids: None):
            return model(**given).loss  # type: ignore[no-any-return]

    return loss_of


def _check_positions(model: nn.Module, seq: int) -> None:
    """Raise ValueError if a model has fewer learned positions than tokens."""
    for name, module in model.named_modules():
        is_learned = name.rpartition(".")[2] in ("position_embeddings", "wpe", "embed_positions")
        if is_learned and isinstance(module, nn.Embedding) and module.num_embeddings < seq:
            most = module.num_embeddings
            raise ValueError(
                f"seq={seq}: {type(model).__name__} has {most} positions; use --seq {most} or less"
            )
