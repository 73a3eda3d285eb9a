"""Universal checkpoints of DeepSpeed."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_universal(
    folder: Path, params: Mapping[str, Mapping[str, Tensor]], step: int = 5, flat: bool = False
) -> None:
    """Write FP32 values and moments of parameters as DeepSpeed's ``ds_to_universal.py`` does.

    Args:
        folder: folder of the checkpoint.
        params: tensors by ``fp32``, ``exp_avg`` and ``exp_avg_sq``, by parameter name.
        step: number of steps taken.
        flat: True for the files of ZeRO-3: 1-D tensors and no step.
    """
    for name, states in params.items():
        path = folder / "zero" / name
        path.mkdir(parents=True)
        for key, value in states.items():
            torch.save(
                value.flatten() if flat else {"param": value, "cat_dim": 0}, path / f"{key}.pt"
            )
        if not flat:
            torch.save(step, path / "step.pt")
