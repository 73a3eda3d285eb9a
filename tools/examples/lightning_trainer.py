#!/usr/bin/env python
"""Lightning's Trainer, automatic optimization or manual: python tools/examples/lightning_trainer.py

In manual optimization clipping is the optimizer's (max_grad_norm=), or the module's own call.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mp_optim


class Student(L.LightningModule):
    def __init__(self, make: Any, manual: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.make, self.losses, self.automatic_optimization = make, [], not manual

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


def main(
    folder: str = "runs/lightning",
    cls: Any = mp_optim.AdamW,
    resume: bool = False,
    manual: bool = False,
    **settings: Any,
) -> list[float]:
    """Fit a random teacher for two epochs of 30 steps; returns the losses."""
    L.seed_everything(0, verbose=False)
    inputs = torch.randn(30 * 64, 16)
    data = DataLoader(TensorDataset(inputs, inputs[:, :4].sin()), batch_size=64)
    student = Student(lambda params: cls(params, lr=1e-2, **settings), manual)
    trainer = L.Trainer(
        accelerator="cpu",
        precision="bf16-true",
        max_epochs=2,
        logger=False,
        gradient_clip_val=None if manual else 1.0,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
    )
    trainer.fit(student, data, ckpt_path=f"{folder}/epoch=0.ckpt" if resume else None)
    return student.losses


if __name__ == "__main__":
    losses = main(offload=0.5, offload_mode="speculative")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
