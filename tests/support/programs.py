"""The programs of tools/examples that are held against torch, and resumed: with what arguments."""

from __future__ import annotations

from typing import Any

PROGRAMS: dict[str, dict[str, Any]] = {
    "hf_trainer_class": {},
    "trl_sft": {},
    "trl_dpo": {},
    "accelerate_loop": {},
    "lightning_trainer": {},
    "lightning_trainer manual": {"manual": True},
    "torchtitan_container": {},
    "vision_ema": {},
}
