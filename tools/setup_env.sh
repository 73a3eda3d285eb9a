# Sourced by the other scripts: `source tools/setup_env.sh EXTRA` makes .venv in the repository root, installs torch and
# mp_optim[EXTRA] in it, and activates it. A second call with nothing changed only activates.
set -euo pipefail

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO_ROOT/.venv"
TORCH_VERSION="2.13.0"

_say() { echo "[setup] $*" >&2; }

_find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    _say "no Python >= 3.10 found; install one, or name it: PYTHON=/path/to/python bash ..."
    return 1
}

# 19,000 modules come with the extra `dev`: Python compiles those that are used, at their first import, and keeps
# the bytecode. A machine that forbids it would have each of the tests' processes compile torch anew, for seconds.
unset PYTHONDONTWRITEBYTECODE
_pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }

_install_torch() {
    if "$VENV/bin/python" -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; then
        return 0
    fi
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then
        _say "installing torch with CUDA (a GPU is present); this downloads a few GB"
        _pip "torch>=2.6"
        return
    fi
    _say "installing torch $TORCH_VERSION for the CPU: 200 MB, a minute or two"
    if [ "$(uname -s)" = Linux ]; then
        # The default index serves a CUDA build on Linux, so ask for the CPU one by name first: torch alone, as what it
        # needs comes with the package, and an index out of reach is tried again for each name that is looked for.
        _pip --no-deps "torch==$TORCH_VERSION+cpu" --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null && return
        _say "no CPU-only build within reach; taking the one of the default index"
    fi
    _pip "torch==$TORCH_VERSION"
}

_setup() {
    local extra="$1" python key stamp kernels
    stamp="$VENV/.installed-$extra"
    key="$(cat "$REPO_ROOT"/{setup.cfg,setup.py,pyproject.toml,tools/setup_env.sh} "$REPO_ROOT"/mp_optim/kernels/csrc/* | cksum) $REPO_ROOT"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
        return 0
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(_find_python)"
        _say "making $VENV"
        "$python" -m venv "$VENV" || { _say "venv failed; on Debian or Ubuntu: apt-get install python3-venv"; return 1; }
    fi
    _say "compiling the kernels of mp_optim meanwhile"
    _pip --no-deps -e "$REPO_ROOT" &
    kernels=$!
    _install_torch
    wait "$kernels"
    _say "installing what mp_optim[$extra] needs: a minute or two"
    _pip "mp_optim[$extra]" # which is here already
    echo "$key" >"$stamp"
    _say "done"
}

_setup "${1:?usage: source tools/setup_env.sh EXTRA}"
export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
