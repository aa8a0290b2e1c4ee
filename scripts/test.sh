#!/usr/bin/env bash
# Runs the linters, the type checker and the default set of tests: all but those marked slow or callers. Does its own set-up.
#   bash scripts/test.sh                      what CI runs
#   bash scripts/test.sh -m fast              for while you write; see tests/README.md
#   bash scripts/test.sh -m slow              campaigns and long matrices
#   bash scripts/test.sh -m callers           real frameworks, each if `bash scripts/callers.sh NAME` has installed it
#   bash scripts/test.sh tests/pure -k trace  only this: all arguments go to pytest

set -euo pipefail
EPP_EXTRAS=dev
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

# On a second core the type checker takes no time of its own, for tests are collected on one.
typed="$(mktemp)"
trap 'rm -f "$typed"' EXIT
python -m mypy >"$typed" 2>&1 &
checker=$!
step python -m ruff check .
step python -m ruff format --check .
step codespell
step shellcheck -x scripts/*.sh scripts/*.sbatch .ci/run
bash scripts/te.sh || printf '%s\n' "Transformer Engine's Python cannot be installed: its tests will be skipped" >&2
# A first plan compiles the planner's inner loops and keeps them on disk; otherwise every process that plans would compile them.
step python -m megatron_epp.tools.cli.main plan --lengths 2400,300,88,900,150 --stages 2 --layers 8 --hidden 1024 --heads 16 \
    --memory-cap-gb 8 --offload --split-weight
# A third file at once uses two cores while others wait.
step python -m pytest --processes 3 -m "not slow and not callers" --durations=25 tests
printf '\n== python -m mypy\n'
wait "$checker" || failed+=("python -m mypy")
cat "$typed"

if [ "${#failed[@]}" -gt 0 ]; then
    printf '\nFailed:\n'
    printf '  %s\n' "${failed[@]}"
    exit 1
fi
