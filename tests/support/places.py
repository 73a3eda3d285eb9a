"""The places of optimizer state (accelerator, host, streamed, disk) as settings of the classes."""

from pathlib import Path
from typing import Any

_HOST: dict[str, Any] = {"offload": 1.0}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": _HOST,
    "overlap": {**_HOST, "offload_mode": "overlap"},
    "speculative": {**_HOST, "offload_mode": "speculative"},
    "streamed": {**_HOST, "offload_place": "streamed"},
    "disk": {**_HOST, "optimizer_state_path": "a folder"},
}


def settings_of(place: str, folder: Path) -> dict[str, Any]:
    found = dict(PLACES[place])
    if "optimizer_state_path" in found:
        found["optimizer_state_path"] = str(folder)
    return found
