#!/usr/bin/env bash
# Set up .venv, then train a small mixture-of-experts model with half of its optimizer on the host.
# Arguments go on to tools/train.py: bash tools/quickstart.sh --optimizer.optimizer-offload-fraction 1.0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh train
exec python tools/train.py --config tools/configs/quickstart.yaml "$@"
