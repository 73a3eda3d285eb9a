"""Keys of a slot's state that mean the same in every layer."""

STEP = "step"
"""The number of steps."""

MASTER = "master_param"
"""The FP32 main param."""

REMAINDER = "remainder"
"""The lower bits of a main param whose upper ones are the bfloat16 parameter."""

SECOND = "exp_avg_sq"
"""The second moment."""

AVERAGE = "averaged_param"
"""The moving average of the main param."""

SCALE = "_scale"


def scale_key(key: str) -> str:
    """Key of the scales of a moment that is stored in blocks."""
    return f"{key}{SCALE}"


def is_scale(key: str) -> bool:
    """Whether this is the key of some moment's scales."""
    return key.endswith(SCALE)
