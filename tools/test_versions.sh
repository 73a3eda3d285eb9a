#!/usr/bin/env bash
# Train, save and resume on other versions of Python and torch, with numpy and without (tools/versions_smoke.py).
#
#   bash tools/test_versions.sh                                  # the oldest and the newest torch (docs/versions.md)
#   bash tools/test_versions.sh "3.10 2.6.0 no" "3.13 2.15.0 2"  # Python, torch, numpy: "no" or its version
#
# Environments are kept in build/versions. A CPU build of torch is taken where PyTorch's index is within reach; else
# the CUDA build of the default index, with stand-ins for NVIDIA's libraries (tests/lab/cuda_stand_ins.py).
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
    "${pip[@]}" --no-deps "torch==$3"
    # what torch needs, less NVIDIA's libraries and Triton, which a CPU does not load
    "$1/bin/python" - >"$1/needed" <<'END'
import importlib.metadata
import re

for line in importlib.metadata.requires("torch"):
    needed, _, condition = line.replace(" (", "").replace(")", "").partition(";")
    name = re.match(r"[\w-]+", needed)[0]
    if name == "cuda-toolkit":
        print("nvidia-cuda-runtime==" + ".".join(needed.split("==")[1].split(".")[:2]) + ".*")
    elif name.startswith("nvidia-cuda-runtime"):
        print(needed)
    elif not name.startswith(("nvidia", "cuda", "triton")) and "extra" not in condition:
        print(line.replace(" (", "").replace(")", ""))
END
    "${pip[@]}" -r "$1/needed" 2>"$1/log" || { cat "$1/log"; return 1; } # which also misses NVIDIA's
    "$1/bin/python" tests/lab/cuda_stand_ins.py
}

failed=0
for row in "$@"; do
    read -r python torch numpy <<<"$row"
    environment="build/versions/python$python-torch$torch-numpy$numpy"
    if [ ! -e "$environment/installed" ]; then
        rm -rf "$environment"
        install "$environment" "$python" "$torch"
        if [ "$numpy" != no ]; then # pip also says that NVIDIA's libraries are missing
            "$environment/bin/python" -m pip install --quiet "numpy==$numpy.*" 2>"$environment/log" || cat "$environment/log"
        fi
        touch "$environment/installed"
    fi
    echo "== Python $python, torch $torch, numpy $numpy"
    PYTHONPATH="$root" OMP_NUM_THREADS=1 "$environment/bin/python" tools/versions_smoke.py || failed=1
done
exit "$failed"
