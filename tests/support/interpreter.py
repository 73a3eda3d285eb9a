"""Speed up Triton's interpreter by caching its search for replaceable functions."""

from collections.abc import Callable
from typing import Any


def look_once() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    # Another Triton version may lack this function.
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is not None:
        interpreter._patch_lang = _OnceInALaunch(patch, interpreter._LangPatchScope)


class _OnceInALaunch:
    """The interpreter's ``_patch_lang``, run once per launch. The launch restores replaced
    functions when it ends; nested calls do not."""

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
