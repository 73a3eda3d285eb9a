"""Assign tests to the processes of pytest-xdist."""

import functools

from xdist.scheduler import LoadScopeScheduling

from support.launch import ROOT


class ModuleFixturesOnce(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _has_module_fixtures(file) else nodeid


@functools.cache
def _has_module_fixtures(file: str) -> bool:
    return 'scope="module"' in (ROOT / file).read_text()
