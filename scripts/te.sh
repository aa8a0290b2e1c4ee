#!/usr/bin/env bash
# Installs Transformer Engine's Python, without its compiled parts, for `pytest -m te`: each version into a folder of its own, so
# that nothing in .venv changes. 3 MB of wheels.
#   bash scripts/te.sh             the versions that are tested
#   bash scripts/te.sh 2.18.0      another
#
# Settings (environment):
#   EPP_TE   the folder (.te)

set -euo pipefail
EPP_EXTRAS=dev
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [ "$#" = 0 ]; then
    mapfile -t tested <tests/support/transformer_engine/versions.txt
    set -- "${tested[@]}"
fi
EPP_UV="$(epp_find_uv)"
for version in "$@"; do
    folder="${EPP_TE:-$EPP_ROOT/.te}/$version"
    if [ -f "$folder/.complete" ]; then
        epp_say "$folder is complete"
        continue
    fi
    rm -rf "$folder"
    epp_add --no-deps --target "$folder" "transformer_engine==$version" einops
    touch "$folder/.complete"
done
