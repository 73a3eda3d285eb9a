#!/usr/bin/env python
"""TRL's SFTTrainer with our optimizer: python tools/examples/trl_sft.py

TRL builds the optimizer from the model that it trains, the adapters of a peft_config included.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import mp_optim

WORDS = "<pad> <eos> the cat sat on a mat and then dog ran off".split()  # noqa: SIM905


SIZES = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)


def main(
    folder: str = "runs/sft", cls: Any = mp_optim.AdamW, resume: bool = False, **settings: Any
) -> list[float]:
    """Learn a few sentences for 60 steps; returns the losses."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    texts = ["the cat sat on a mat", "a dog ran off and the cat sat"] * 240
    trainer = SFTTrainer(
        LlamaForCausalLM(SIZES).bfloat16(),
        SFTConfig(folder, max_steps=60, save_steps=30, logging_steps=1, report_to=[], use_cpu=True),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokens,
        optimizer_cls_and_kwargs=(cls, {"lr": 3e-3, **settings}),
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-30" if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main(offload=1.0, offload_mode="overlap")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
