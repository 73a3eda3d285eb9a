"""The rules of one pass over the elements. Formulas: docs/numerics.md.

- Adam and AdamW: Kingma & Ba 2015, Loshchilov & Hutter 2019
- Lion: the sign of an interpolated momentum, Chen et al. 2023
- SGD with momentum, as torch defines it
"""

from __future__ import annotations

from mp_optim.rules.rule import ElementRule, Settings


def check_decoupled(group: Settings) -> None:
    """Raise ValueError for cautious decay that is a part of the gradient."""
    if group.get("cautious_wd") and not group.get("adam_w_mode", True):
        raise ValueError(
            "cautious_wd=True: needs decoupled weight decay; set adam_w_mode=True "
            "(decoupled_weight_decay=True of the config)"
        )


class AdamRule(ElementRule):
    """Adam. With ``betas[0]`` at 0 it keeps no first moment, which would be the gradient."""

    name = "adam"

    def deciding_setting(self, group: Settings) -> str:
        return "betas"

    def moments(self, group: Settings) -> tuple[str, ...]:
        unread = self.unread_moments(group)
        return tuple(name for name in super().moments(group) if name not in unread)

    def check_settings(self, group: Settings) -> None:
        super().check_settings(group)
        check_decoupled(group)

    def unread_moments(self, group: Settings) -> tuple[str, ...]:
        match group["betas"]:
            case (first, _, *_) if first == 0.0:
                return ("exp_avg",)
        return ()  # also for values that are not betas; check_settings names them


class LionRule(ElementRule):
    """Lion, with decoupled weight decay."""

    name = "lion"

    def reads_steps(self, group: Settings) -> bool:
        return False


class SgdRule(ElementRule):
    """SGD with momentum. The momentum buffer starts as the first gradient."""

    name = "sgd"

    def deciding_setting(self, group: Settings) -> str:
        return "momentum"

    def moments(self, group: Settings) -> tuple[str, ...]:
        return super().moments(group) if group["momentum"] else ()

    def reads_steps(self, group: Settings) -> bool:
        return False

    def check_settings(self, group: Settings) -> None:
        super().check_settings(group)
        if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
            raise ValueError(
                f"nesterov={group['nesterov']!r}: must be False unless momentum > 0 and "
                "dampening == 0"
            )
