"""Triton's interpreter with a cached search for replaceable functions, for speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def look_once() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = getattr(interpreter, "_patch_lang", None)  # another Triton may have none
    if patch is not None:
        interpreter._patch_lang = _OnceInALaunch(patch, interpreter._LangPatchScope)


class _OnceInALaunch:
    """The interpreter's ``_patch_lang``: a launch restores what was replaced when it ends, and
    what it calls does not."""

    def __init__(self, patch: Callable[[Any], Any], nothing: Callable[[], Any]) -> None:
        self._patch, self._nothing = patch, nothing
        self._patched: set[int] = set()

    def __call__(self, function: Any) -> Any:
        module = id(function.__globals__)
        if module in self._patched:
            return self._nothing()
        self._patched.add(module)
        scope = self._patch(function)
        restore = scope.restore

        def end() -> None:
            self._patched.clear()
            restore()

        scope.restore = end
        return scope
