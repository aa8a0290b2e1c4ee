#!/usr/bin/env bash
# Shows updates of reinforcement learning by plans: 20 steps of GRPO by verl's own engine, with equal rewards, losses and weights,
# and a batch with a long response in slices under a memory cap. Does its own set-up; `bash scripts/callers.sh verl` installs verl,
# without which an imitation of its microbatches takes the second part. Results go to runs/demo_rl/. `--help` lists the options.

set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export PYTHONPATH="$EPP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec python -W ignore -m scripts.demo_rl "$@"
