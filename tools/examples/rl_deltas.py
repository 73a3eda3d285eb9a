#!/usr/bin/env python
"""Two processes, a trainer and a generator, that share weights by deltas alone.

python tools/examples/rl_deltas.py train runs/deltas --steps 500
python tools/examples/rl_deltas.py generate runs/deltas

Each step the trainer publishes which weights changed, as a file; the generator takes it, samples a
group of answers to each prompt and writes them down, with a digest of its weights. The trainer
compares the digest with its own, and learns from the answers (group-relative policy gradients, fp16
with a dynamic loss scale). Either process may be killed and started again. With --codes the
trainer publishes float8 codes of the matrices, and the generator computes with their values. Both
processes need the option.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mp_optim import OptimizerConfig, WeightDelta, apply_delta, checkpoint, get_megatron_optimizer
from mp_optim.apps.deltas import DeltaQuantizer, quantized_weights

PROMPTS, ANSWERS, LENGTH, WORDS = 8, 8, 6, 24
FULL_EVERY, SAVE_EVERY = 100, 50
FORM, MATRICES = "fp8_row", "hidden.weight|head.weight"


class Policy(nn.Module):
    """Chooses the next word from the prompt and the last word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt, self.word = nn.Embedding(PROMPTS, 32), nn.Embedding(WORDS + 1, 32)
        self.hidden, self.head = nn.Linear(32, 64), nn.Linear(64, WORDS)

    def forward(self, prompts: Tensor, last: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.prompt(prompts) + self.word(last)))).float()


def published(model: nn.Module, codes: bool) -> dict[str, Tensor]:
    """The tensors that a generator has: the weights, or codes and scales in place of matrices."""
    return quantized_weights(model, FORM, MATRICES) if codes else dict(model.named_parameters())


def digest(weights: dict[str, Tensor]) -> str:
    """Of every bit of the weights."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(bytes(weights[name].detach().view(torch.uint8).flatten().tolist()))
    return found.hexdigest()


def write(path: Path, content: str) -> None:
    """All of it, or nothing."""
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(content)
    beside.replace(path)


def wait_for(path: Path, done: Path) -> bool:
    """Whether it is there, before everything is done."""
    while not path.exists():
        if done.exists():
            return False
        time.sleep(0.002)
    return True


# -- the trainer ----------------------------------------------------------------------------------


def loss_of(model: Policy, answers: Tensor) -> Tensor:
    """Answers are better the more of their words are the prompt's own."""
    prompts = torch.arange(PROMPTS)[:, None, None].expand_as(answers)
    rewards = (answers == prompts).float().mean(2)
    advantages = rewards - rewards.mean(1, keepdim=True)
    last = torch.cat([torch.full_like(answers[..., :1], WORDS), answers[..., :-1]], dim=2)
    chances = torch.distributions.Categorical(logits=model(prompts, last)).log_prob(answers)
    return -(advantages[..., None] * chances).mean()


def train(folder: Path, steps: int, codes: bool) -> dict[str, float]:
    """Goes on from the last checkpoint in the folder. Returns what was counted."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Policy().half()
    config = OptimizerConfig(lr=1e-2, fp16=True, loss_scale_window=8, initial_loss_scale=2.0**28)
    optimizer = get_megatron_optimizer(config, model)
    begin, saved = 0, folder / "checkpoint"
    if saved.exists():
        begin = checkpoint.load(saved, model, optimizer)["step"]
    optimizer.track_changes()
    quantizer = DeltaQuantizer(FORM, MATRICES)
    run = folder / f"run-{len(list(folder.glob('run-*'))):03d}"
    run.mkdir()
    counts = {"skipped": 0.0, "compared": 0.0, "bytes": 0.0, "reward": 0.0}
    for step in range(begin, steps):
        delta = optimizer.changed_weights(full=(step - begin) % FULL_EVERY == 0)
        delta = quantizer.quantize(delta, model) if codes else delta
        counts["bytes"] += delta.save(run / f"{delta.number:06d}.safetensors")
        answer = run / f"{delta.number:06d}.json"
        wait_for(answer, folder / "never")
        told = json.loads(answer.read_text())
        if told["digest"] != digest(published(model, codes)):
            raise RuntimeError(f"step {step}: the generator has other weights")
        counts["compared"] += 1
        answers = torch.tensor(told["answers"])
        prompts = torch.arange(PROMPTS)[:, None, None]
        counts["reward"] = float((answers == prompts).float().mean())
        optimizer.zero_grad()
        optimizer.scale_loss(loss_of(model, answers)).backward()
        counts["skipped"] += not optimizer.step().success
        if (step + 1) % SAVE_EVERY == 0:
            checkpoint.save(saved, model, optimizer, extra={"step": step + 1})
    write(folder / "done", "")
    return counts


# -- the generator --------------------------------------------------------------------------------


def publications(folder: Path) -> Iterator[tuple[Path, bool]]:
    """What has to be taken, in order, and whether it begins anew: from the newest full publication
    of the newest run on, and from a newer run as soon as there is one."""
    run, number = Path(), 0
    while not (folder / "done").exists():
        newest = max(folder.glob("run-*"), default=None)
        if newest is None or not (newest / "000001.safetensors").exists():
            time.sleep(0.002)
            continue
        if newest != run:
            run, last = newest, len(list(newest.glob("*.safetensors")))
            number = (last - 1) // FULL_EVERY * FULL_EVERY + 1
            yield run / f"{number:06d}.safetensors", True
        elif (path := run / f"{number + 1:06d}.safetensors").exists():
            number += 1
            yield path, False
        else:
            time.sleep(0.002)


@torch.no_grad()
def sample(model: Policy, seed: int) -> Tensor:
    """A group of answers to each prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.arange(PROMPTS)[:, None].expand(PROMPTS, ANSWERS).reshape(-1)
    words = [torch.full_like(prompts, WORDS)]
    for _ in range(LENGTH):
        chances = model(prompts, words[-1]).softmax(-1)
        words.append(torch.multinomial(chances, 1, generator=generator).view(-1))
    return torch.stack(words[1:], dim=1).view(PROMPTS, ANSWERS, LENGTH)


@torch.no_grad()
def generate(folder: Path, codes: bool) -> int:
    """Answers to each publication, until the trainer is done; returns how many there were."""
    model, after, count = Policy().half(), None, 0
    weights = published(model, codes)
    for path, anew in publications(folder):
        delta = WeightDelta.load(path)
        after = apply_delta(weights, delta, None if anew else after)
        for name in MATRICES.split("|") if codes else []:
            values = weights[name].float() * weights[f"{name}_scale"]
            model.get_parameter(name).copy_(values)
        told = {"answers": sample(model, delta.number).tolist(), "digest": digest(weights)}
        write(path.with_suffix(".json"), json.dumps(told))
        count += 1
    return count


def main() -> None:
    role, folder, *rest = sys.argv[1:]
    codes = "--codes" in rest
    if role == "train":
        steps = int(rest[rest.index("--steps") + 1]) if "--steps" in rest else 500
        print(json.dumps(train(Path(folder), steps, codes)))
    else:
        print(json.dumps({"taken": generate(Path(folder), codes)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
