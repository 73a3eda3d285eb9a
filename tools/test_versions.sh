#!/usr/bin/env bash
# Train, save and resume on other versions of Python and torch, with numpy and without (tools/versions_smoke.py).
#
#   bash tools/test_versions.sh                                  # the oldest and the newest torch (docs/versions.md)
#   bash tools/test_versions.sh "3.10 2.6.0 no" "3.13 2.15.0 2"  # Python, torch, numpy: "no" or its version
#
# Environments are kept in build/versions. A CPU build of torch is taken where PyTorch's index is within reach; else
# the CUDA build of the default index, a download of 3 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"
index="https://download.pytorch.org/whl/cpu"
if [ "$#" -eq 0 ]; then
    set -- "3.10 2.6.0 no" "3.10 2.6.0 2" "3.13 2.6.0 no" "3.13 2.15.0 no" "3.13 2.15.0 2" "3.10 2.14.1 2"
fi

find_python() { # find_python 3.10
    local candidate
    for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then command -v "$candidate" && return; fi
    done
    echo "no Python $1 here" >&2 && return 1
}

install() { # install ENVIRONMENT PYTHON TORCH
    local pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check)
    "$(find_python "$2")" -m venv "$1"
    if "${pip[@]}" "torch==$3" --index-url "$index" --timeout 10 --retries 0 2>/dev/null; then return; fi
    "${pip[@]}" "torch==$3"
}

failed=0
for row in "$@"; do
    read -r python torch numpy <<<"$row"
    environment="build/versions/python$python-torch$torch-numpy$numpy"
    if [ ! -e "$environment/installed" ]; then
        rm -rf "$environment"
        install "$environment" "$python" "$torch"
        if [ "$numpy" != no ]; then "$environment/bin/python" -m pip install --quiet "numpy==$numpy.*"; fi
        touch "$environment/installed"
    fi
    echo "== Python $python, torch $torch, numpy $numpy"
    PYTHONPATH="$root" OMP_NUM_THREADS=1 "$environment/bin/python" tools/versions_smoke.py || failed=1
done
exit "$failed"
