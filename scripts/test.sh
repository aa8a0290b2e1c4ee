#!/usr/bin/env bash
# Runs the linters, the type checker and the whole test suite. Does its own set-up.
#   bash scripts/test.sh                      everything
#   bash scripts/test.sh tests/pure -k trace  only this: all arguments go to pytest

set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$#" -gt 0 ]; then exec python -m pytest "$@"; fi

# Everything runs even when an early step fails; the exit code tells.
failed=()
step() {
    printf '\n== %s\n' "$*"
    "$@" || failed+=("$*")
}

step python -m ruff check .
step python -m ruff format --check .
step python -m mypy
step codespell
step shellcheck -x scripts/*.sh scripts/*.sbatch .ci/run
# Files stay whole, for their tests share what they look at, and in order.
step python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

if [ "${#failed[@]}" -gt 0 ]; then
    printf '\nFailed:\n'
    printf '  %s\n' "${failed[@]}"
    exit 1
fi
