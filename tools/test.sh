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
if [ "$#" -gt 0 ]; then
    exec python -m pytest --cov=mp_optim --cov-report=term "$@"
fi
# One process a core, one thread each; tests of threads ask for theirs.
export OMP_NUM_THREADS=1
python -m pytest -n auto --cov=mp_optim --cov-report=term --cov-fail-under=90
# Again without the native kernels, and with each of the slower ones that this CPU has. Left out is what chooses its
# level or backend itself.
chosen="--ignore=tests/unit/update/test_native.py --ignore=tests/unit/update/test_sanitizers.py
    --ignore=tests/unit/update/test_triton.py --ignore=tests/unit/update/test_conformance.py
    --ignore=tests/unit/update/test_guards.py"
levels="off,$(python -c 'from mp_optim.update.backends.native_library import native_library as n; print(",".join(n().levels))')"
for level in off baseline avx2; do
    case ",$levels," in *",$level,"*) ;; *) continue ;; esac
    echo "== pytest, MP_OPTIM_NATIVE=$level"
    # shellcheck disable=SC2086
    MP_OPTIM_NATIVE="$level" python -m pytest -q -n auto -m "not slow" $chosen tests/unit tests/functional/test_functional.py
done
