"""A plain AdamW, and more than forty wrong versions of it."""

import random
from typing import Any

import torch

SOURCE = """
class PlainAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        if not lr >= 0:
            raise ValueError(f"lr={lr}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                gradient = param.grad
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(param)
                    state["square"] = torch.zeros_like(param)
                state["step"] += 1
                count, mean, square = state["step"], state["mean"], state["square"]
                mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
                square.mul_(beta2).add_(gradient * gradient, alpha=1 - beta2)
                left, right = 1 - beta1**count, 1 - beta2**count
                below = square.sqrt() / right**0.5 + eps
                param.mul_(1 - lr * decay)
                param.sub_(lr / left * mean / below)
        return loss
"""

_COUNT = 'count, mean, square = state["step"], '
_AHEAD = 'count, mean, square = state["step"] + 1, '
_LOAD = "        return loss\n"
_SAVED = "\n    def state_dict(self):\n        saved = super().state_dict()\n"
_LOADED = "\n    def load_state_dict(self, state_dict):\n"

MUTANTS: dict[str, tuple[str, str, str]] = {
    # Name of the wrong version: the check that must fail, a part of SOURCE, and its replacement.
    "mean not corrected": ("first_step_follows_adam", "lr / left", "lr"),
    "square not corrected": ("first_step_follows_adam", " / right**0.5", ""),
    "count one ahead": ("first_step_follows_adam", _COUNT, _AHEAD),
    "corrected as at step 1": ("ten_steps_follow_adam", "1 - beta1**count", "1 - beta1"),
    "betas exchanged": ("ten_steps_follow_adam", "beta1, beta2 =", "beta2, beta1 ="),
    "mean never decays": ("ten_steps_follow_adam", "mean.mul_(beta1)", "mean"),
    "eps inside the root": (
        "eps_is_outside_the_root",
        "square.sqrt() / right**0.5 + eps",
        "(square / right + eps).sqrt()",
    ),
    "eps before the correction": (
        "eps_is_added_after_bias_correction",
        "square.sqrt() / right**0.5 + eps",
        "(square.sqrt() + eps) / right**0.5",
    ),
    "decay of L2": (
        "decay_is_decoupled",
        "gradient = param.grad\n",
        "gradient = param.grad + decay * param; decay = 0.0\n",
    ),
    "moments in codes without a zero": (
        "zero_gradients_move_nothing",
        "left, right = 1",
        "scale = mean.abs().max() / 127\n"
        "                mean.div_(scale).floor_().add_(0.5).mul_(scale)\n"
        "                left, right = 1",
    ),
    "one counter for all": (
        "a_late_parameter_is_stepped_as_a_new_one",
        _COUNT,
        'self.count = max(getattr(self, "count", 0), state["step"])\n'
        "                count, mean, square = self.count, ",
    ),
    "one moment for each shape": (
        "each_group_has_its_settings",
        'state["mean"] = torch.zeros_like(param)',
        'self.shared = getattr(self, "shared", {})\n'
        '                    state["mean"] = self.shared.setdefault(param.shape, 0 * param)',
    ),
    "steps without gradient count": (
        "steps_without_a_gradient_do_not_count",
        "                    continue\n",
        "                    if self.state[param]:\n"
        '                        self.state[param]["step"] += 1\n'
        "                    continue\n",
    ),
    "decay without a gradient": (
        "no_gradient_is_no_step",
        "                    continue\n",
        "                    param.mul_(1 - lr * decay)\n                    continue\n",
    ),
    "only the first parameter of a group": (
        "every_parameter_is_stepped",
        'in group["params"]:',
        'in group["params"][:1]:',
    ),
    "lr of the constructor": (
        "the_rate_is_read_at_each_step",
        'group["lr"]',
        'self.defaults["lr"]',
    ),
    "decay of the constructor": (
        "each_group_has_its_settings",
        'group["weight_decay"]',
        'self.defaults["weight_decay"]',
    ),
    "a division by lr": ("a_warm_up_from_zero_is_harmless", "lr / left *", "1 / (left / lr) *"),
    "noise": ("resumes_to_the_bit", "+ eps", "+ eps + random.random() * 1e-3"),
    "another tensor": (
        "a_step_writes_in_place",
        "param.sub_(lr / left * mean / below)",
        "param.data = param - lr / left * mean / below",
    ),
    "behind autograd's back": (
        "a_step_is_seen_by_autograd",
        "param.mul_(1 - lr * decay)\n                param.sub_(",
        "param.data.mul_(1 - lr * decay)\n                param.data.sub_(",
    ),
    "gradients are scaled": (
        "gradients_are_left_alone",
        "add_(gradient, alpha=1 - beta1)",
        "add_(gradient.mul_(1 - beta1)); gradient = gradient / (1 - beta1)",
    ),
    "the first mean is the gradient": (
        "gradients_are_left_alone",
        'state["mean"] = torch.zeros_like(param)',
        'state["mean"] = gradient',
    ),
    "a closure without gradients": (
        "a_closure_is_called_and_its_loss_returned",
        "torch.enable_grad()",
        "torch.no_grad()",
    ),
    "a loss that is kept": ("a_closure_is_called_and_its_loss_returned", "return loss", "return"),
    "a norm spreads a NaN": (
        "a_nan_stays_where_it_is",
        "gradient = param.grad\n",
        "gradient = param.grad / param.grad.norm().clamp(max=1e30, min=1e30) * 1e30\n",
    ),
    "counts are not saved": (
        "resumes_to_the_bit",
        _LOAD,
        _LOAD + _SAVED + '        for each in saved["state"].values():\n'
        '            each["step"] = 0\n        return saved\n',
    ),
    "moments are not saved": (
        "what_was_loaded_is_saved_again",
        _LOAD,
        _LOAD + _LOADED + '        super().load_state_dict({**state_dict, "state": {}})\n',
    ),
    "moments in 16 bits on the way": (
        "resumes_after_the_first_step",
        _LOAD,
        _LOAD + _LOADED + "        super().load_state_dict(state_dict)\n"
        "        for each in self.state.values():\n"
        '            each["mean"] = each["mean"].bfloat16().float()\n',
    ),
    "lr is not loaded": (
        "settings_are_saved",
        _LOAD,
        _LOAD + _LOADED + '        rates = [group["lr"] for group in self.param_groups]\n'
        "        super().load_state_dict(state_dict)\n"
        "        for group, rate in zip(self.param_groups, rates):\n"
        '            group["lr"] = rate\n',
    ),
    "any state is loaded": (
        "another_models_state_is_refused",
        _LOAD,
        _LOAD + _LOADED + "        self.loaded = state_dict\n",
    ),
    "a state dict of objects": (
        "a_state_dict_is_plain_data",
        _LOAD,
        _LOAD + _SAVED + '        return {**saved, "rng": random.Random()}\n',
    ),
    "main params are not followed": (
        "weights_loaded_alone_are_stepped_from",
        "param.mul_(1 - lr * decay)\n                param.sub_(lr / left * mean / below)",
        'main = state.setdefault("main", param.clone())\n'
        "                main.mul_(1 - lr * decay).sub_(lr / left * mean / below)\n"
        "                param.copy_(main)",
    ),
    "parameters of the constructor": (
        "a_replaced_parameter_is_followed",
        'for param in group["params"]:',
        'for param in group.setdefault("own", list(group["params"])):',
    ),
    "groups without defaults": (
        "a_group_may_be_added_later",
        _LOAD,
        _LOAD + "\n    def add_param_group(self, group):\n"
        '        if getattr(self, "param_groups", None):\n'
        "            self.param_groups.append(group)\n"
        "        else:\n            super().add_param_group(group)\n",
    ),
    "gradients read as memory": (
        "transposed_gradients_are_read_right",
        "gradient = param.grad\n",
        "gradient = param.grad.as_strided(param.shape, param.contiguous().stride())\n",
    ),
    "a first dimension is taken for granted": (
        "scalars_are_stepped",
        "gradient = param.grad\n",
        "gradient = param.grad * (param.shape[0] > -1)\n",
    ),
    "a maximum of nothing": (
        "empty_parameters_are_no_harm",
        "gradient = param.grad\n",
        "gradient = param.grad * bool(param.grad.abs().max() > -1)\n",
    ),
    "memory of the first step": (
        "data_may_be_swapped",
        "param.mul_(1 - lr * decay)",
        'param = state.setdefault("memory", param.detach())\n'
        "                param.mul_(1 - lr * decay)",
    ),
    "gradients are kept": (
        "gradients_are_let_go",
        _COUNT,
        f"self.last = gradient\n                {_COUNT}",
    ),
    "a history": (
        "memory_does_not_grow",
        _COUNT,
        'self.past = [*getattr(self, "past", []), gradient + 0]\n                ' + _COUNT,
    ),
    "moments of the default dtype": (
        "a_default_dtype_does_not_reach_a_step",
        'state["mean"] = torch.zeros_like(param)',
        'state["mean"] = torch.zeros(param.shape)',
    ),
    "zero_grad that always removes": (
        "zero_grad_clears",
        _LOAD,
        _LOAD + "\n    def zero_grad(self, set_to_none=True):\n        pass\n",
    ),
    "state that is not the parameter's": (
        "state_is_keyed_by_parameters",
        "state = self.state[param]",
        "state = self.state[param]\n                self.state[gradient] = {}",
    ),
}


def built(name: str | None = None) -> type[torch.optim.Optimizer]:
    source = SOURCE
    if name is not None:
        _, text, instead = MUTANTS[name]
        assert source.count(text) == 1, f"{name}: {text!r} is there {source.count(text)} times"
        source = source.replace(text, instead)
    names: dict[str, Any] = {"torch": torch, "random": random}
    exec(source, names)
    made: type[torch.optim.Optimizer] = names["PlainAdamW"]
    return made
