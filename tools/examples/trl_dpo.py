#!/usr/bin/env python
"""TRL's DPOTrainer with our optimizer, which it takes ready made: python tools/examples/trl_dpo.py

Where TRL adds adapters (peft_config), wrap the model with peft first and build the optimizer then.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import mp_optim

WORDS = "<pad> <eos> the cat sat on a mat and then dog ran off".split()  # noqa: SIM905
PAIR = {"prompt": ["the cat"], "chosen": [" sat on a mat"], "rejected": [" ran off"]}


SIZES = LlamaConfig(
    vocab_size=len(WORDS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
)


def main(
    folder: str = "runs/dpo", cls: Any = mp_optim.AdamW, resume: bool = False, **settings: Any
) -> list[float]:
    """Prefer one end of a sentence for 60 steps; returns the losses."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(SIZES).bfloat16()
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),  # the reference, which is not trained
        args=DPOConfig(
            folder, max_steps=60, save_steps=30, logging_steps=1, report_to=[], use_cpu=True
        ),
        train_dataset=Dataset.from_dict({key: value * 480 for key, value in PAIR.items()}),
        processing_class=tokens,
        optimizers=(cls(model.parameters(), lr=1e-3, **settings), None),
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-30" if resume else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main(offload=0.5)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
