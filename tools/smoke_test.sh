#!/usr/bin/env bash
# Build the sdist and, from it, the wheel; install each into an empty environment that has no compiler, and train.
# No network: everything but the package is what the active environment has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
packages="$(python -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("torch").origin).parents[1])')"

# where a release's workflow runs: the README's links lead there
export GITHUB_SERVER_URL=https://example.org GITHUB_REPOSITORY=mp_optim/mp_optim GITHUB_REF_NAME=v0

quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; return 1; }; }

# in_empty NAME COMMAND...: runs where there is the environment NAME, and no compiler
in_empty() { env -u PYTHONPATH PATH="$work/$1/bin" CC=none CXX=none "${@:2}"; }

try() { # try NAME FILE BACKEND: installs FILE into a new environment NAME, whose steps BACKEND has to take
    python -m venv --without-pip "$work/$1"
    # torch, pip and setuptools; the package itself is not seen: .pth files of such a folder are not read
    in_empty "$1" python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >"$work/site"
    echo "$packages" >"$(cat "$work/site")/torch.pth"
    quietly in_empty "$1" python -m pip install --ignore-installed --no-deps --no-index --no-build-isolation \
        --disable-pip-version-check "$2"
    in_empty "$1" python tools/smoke_test.py "$3"
}

echo "== sdist and wheel"
quietly python -m build --no-isolation --outdir "$work/dist" .
du -h "$work"/dist/*
ls "$work"/dist | grep -q "py3-none-.*_$(uname -m).whl" || { echo "the wheel is not for every Python here"; exit 1; }
! tar tzf "$work"/dist/*.tar.gz | grep "_native.*\.so$" || { echo "the sdist has compiled kernels"; exit 1; }
! python -m zipfile -l "$work"/dist/*.whl | grep "csrc" || { echo "the wheel has sources of kernels"; exit 1; }
echo "== the wheel, without a compiler"
try wheel "$work"/dist/*.whl native
in_empty wheel mp-optim doctor >"$work/log"
grep "^cpu *native " "$work/log"
echo "== the sdist, without a compiler"
try sdist "$work"/dist/*.tar.gz reference
