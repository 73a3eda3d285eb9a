#!/usr/bin/env bash
# Set up .venv, then everything that has to pass. Arguments go on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh dev

# Arguments are for a look at some tests; without them the package is built and tried meanwhile.
log="$(mktemp)"
if [ "$#" -eq 0 ]; then bash tools/smoke_test.sh >"$log" 2>&1 & smoke=$!; fi
echo "== ruff"
ruff check .
ruff format --check .
echo "== mypy"
mypy
echo "== import layers"
lint-imports
echo "== documentation site"
site="$(mktemp -d)"
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir "$site"
rm -r "$site"
if [ "$#" -gt 0 ]; then
    echo "== pytest"
    exec python -m pytest "$@"
fi
# One process a core and one more, as tests of ranks wait for each other; one thread each. Tests of threads ask for theirs,
# and those let others run while they wait.
cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
export PYTEST_XDIST_AUTO_NUM_WORKERS=$((cores + 1)) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
echo "== pytest"
python -m pytest -n auto -m "not slow" --durations=40
echo "== the package as it is released"
wait "$smoke" && cat "$log" || { cat "$log"; exit 1; }
# Again without the native kernels: the tests of code that branches there. All tests that step something, the other levels
# of this CPU, what is marked slow, and coverage are for the night (python tests/lab nightly).
python tests/lab levels off --branches
