#!/usr/bin/env bash
# Set up .venv, then everything that has to pass. Arguments go on to pytest; with them coverage is not enforced.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh dev

echo "== ruff"
ruff check .
echo "== mypy"
mypy
echo "== import layers"
lint-imports
echo "== pytest"
if [ "$#" -eq 0 ]; then
    exec python -m pytest --cov=mp_optim --cov-report=term --cov-fail-under=90
fi
exec python -m pytest --cov=mp_optim --cov-report=term "$@"
