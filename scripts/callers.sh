#!/usr/bin/env bash
# Installs a framework that calls Megatron's schedules, of the versions in tests/callers/, for `pytest -m callers` and, verl,
# scripts/demo_rl.sh: into a folder of its own, without dependencies, so that nothing in .venv changes.
#   bash scripts/callers.sh verl      270 MB of wheels
#   bash scripts/callers.sh swift     70 MB
#   bash scripts/callers.sh bridge    60 MB
#
# Settings (environment):
#   EPP_CALLERS   the folder (.callers)

set -euo pipefail
EPP_EXTRAS=dev
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [ "$#" -ne 1 ] || [ ! -f "tests/callers/$1.txt" ]; then
    known=(tests/callers/*.txt)
    known=("${known[@]##*/}")
    epp_say "usage: bash scripts/callers.sh FRAMEWORK, one of: ${known[*]%.txt}"
    exit 2
fi
folder="${EPP_CALLERS:-$EPP_ROOT/.callers}/$1"
wanted="tests/callers/$1.txt"
if cmp -s "$wanted" "$folder/.complete"; then
    epp_say "$folder is complete"
    exit 0
fi
rm -rf "$folder"
EPP_UV="$(epp_find_uv)"
epp_add --no-deps --target "$folder" --requirement "$wanted"
cp "$wanted" "$folder/.complete"
