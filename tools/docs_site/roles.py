"""An extension of griffe: references in docstrings, :class:`X` and its like, become links."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, NameResolutionError, Object

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`(~?)([\w.]+)`")


class Roles(Extension):
    """A name that has no entry on the site stays as code, without a link."""

    def on_object(self, *, obj: Object, **context: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(
                lambda match: _link(obj, match[2], bool(match[1])), obj.docstring.value
            )


def _link(scope: Object, name: str, shortened: bool) -> str:
    shown = name.rpartition(".")[2] if shortened else name
    return f'<autoref optional identifier="{_path(scope, name)}"><code>{shown}</code></autoref>'


def _path(scope: Object, name: str) -> str:
    """What a name in a docstring stands for: absolute, or as the object's module has it."""
    try:
        return name if name.startswith("mp_optim.") else scope.resolve(name)
    except NameResolutionError:
        return name
