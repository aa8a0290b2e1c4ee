#!/usr/bin/env bash
# Shows updates of reinforcement learning by plans: 20 steps of GRPO by verl's own engine, with equal rewards, losses and weights.
# Does its own set-up, after `bash scripts/callers.sh verl`. Results go to runs/demo_rl/. `--help` lists the options.

set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export PYTHONPATH="$EPP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec python -W ignore -m scripts.demo_rl "$@"
