#!/usr/bin/env bash
# Trains a small GPT on real documents, once with the stock schedule and once with elastic plans, and compares the two.
# Does its own set-up; works with and without a GPU. Results go to runs/quickstart/. `--help` lists the options.

set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

exec megatron-epp quickstart "$@"
