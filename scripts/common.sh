#!/usr/bin/env bash
# Sourced by the other scripts: finds a Python 3.12 or newer, makes .venv and installs the package into it.
# Safe to run again and again: what is already done is not done twice, and what broke half-way is done again.
#
# A script that needs more than a training sets EPP_EXTRAS before: the extras of setup.py that are installed.
#
# Settings (environment):
#   EPP_PYTHON   make .venv with this Python (3.12 or newer) instead of the first that is found
#   EPP_INSTALL  "no": take .venv as it is, and install nothing

set -euo pipefail

EPP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EPP_VENV="$EPP_ROOT/.venv"
EPP_EXTRAS="${EPP_EXTRAS:-train,fast,viz}"
EPP_TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

# Containers often forbid Python to keep bytecode. uv compiles nothing when it installs, so that every process would compile torch
# and Megatron again, which takes longer than to import them.
unset PYTHONDONTWRITEBYTECODE

epp_say() { printf '%s\n' "$*" >&2; }

# A pyenv shim may be on the PATH and refuse, and Debian's python3 may lack what venv needs: believe only what runs.
epp_python_runs() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

epp_python_candidates() {
    if [ -n "${EPP_PYTHON:-}" ]; then
        printf '%s\n' "$EPP_PYTHON"
        return
    fi
    printf '%s\n' python3.12
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python
    if command -v uv >/dev/null 2>&1; then uv python find 3.12 2>/dev/null || true; fi
    printf '%s\n' python3 python3.13 python3.14
}

epp_find_python() {
    local candidate
    while IFS= read -r candidate; do
        if epp_python_runs "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done < <(epp_python_candidates)
    epp_say "No Python 3.12 or newer (with venv) was found. Install one of:"
    epp_say "  uv:            curl -LsSf https://astral.sh/uv/install.sh | sh && uv python install 3.12"
    epp_say "  pyenv:         pyenv install 3.12"
    epp_say "  Ubuntu 24.04:  sudo apt install python3.12 python3.12-venv"
    epp_say "  macOS:         brew install python@3.12"
    epp_say "or set EPP_PYTHON to the interpreter to use."
    return 1
}

epp_make_venv() {
    if [ -x "$EPP_VENV/bin/python" ] && epp_python_runs "$EPP_VENV/bin/python"; then return; fi
    local python
    python="$(epp_find_python)"
    epp_say "Making .venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$EPP_VENV"
}

# uv downloads in parallel and installs in about a third of pip's time. Where no index has it, pip does the same.
epp_find_uv() {
    if command -v uv 2>/dev/null; then return; fi
    if [ ! -x "$EPP_VENV/bin/uv" ]; then
        "$EPP_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: uv >/dev/null 2>&1 || return 0
    fi
    printf '%s\n' "$EPP_VENV/bin/uv"
}

# Installs with uv, or with pip where EPP_UV is empty; either shows its progress. uv does not read pip's settings.
epp_add() {
    local arguments=(--constraint "$EPP_ROOT/scripts/constraints.txt" "$@") indexes=()
    if [ -z "$EPP_UV" ]; then
        "$EPP_VENV/bin/python" -m pip install --disable-pip-version-check "${arguments[@]}"
        return
    fi
    mapfile -t indexes < <("$EPP_VENV/bin/python" "$EPP_ROOT/scripts/pip_settings.py")
    "$EPP_UV" pip install --python "$EPP_VENV/bin/python" --index-strategy unsafe-best-match "${indexes[@]}" "${arguments[@]}"
}

# Without an NVIDIA driver the CUDA build of torch is gigabytes for nothing.
epp_has_gpu() {
    [ "$(uname -s)" != Linux ] || [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1
}

# The CPU build comes from any index that pip is set up with, or from torch's own where this network reaches it. Without either
# the default build serves too.
epp_add_cpu_torch() {
    local version indexes=()
    version="$(sed -n 's/^torch==//p' "$EPP_ROOT/scripts/constraints.txt")"
    if "$EPP_VENV/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=5)' \
        "$EPP_TORCH_CPU_INDEX" >/dev/null 2>&1; then indexes=(--extra-index-url "$EPP_TORCH_CPU_INDEX"); fi
    epp_say "No GPU: looking for the CPU build of torch $version"
    if epp_add --dry-run "torch==$version+cpu" "${indexes[@]}" >/dev/null 2>&1; then
        epp_add "torch==$version+cpu" "${indexes[@]}"
    else
        epp_say "No index within reach has it for this Python: the default build serves too, but is gigabytes larger"
    fi
}

epp_install() {
    [ "${EPP_INSTALL:-yes}" != no ] || return 0
    local stamp="$EPP_VENV/.megatron-epp-installed" stamps wanted
    wanted="$(cd "$EPP_ROOT" && { printf '%s\n' "$EPP_ROOT" && cat setup.py pyproject.toml scripts/constraints.txt; } | cksum)"
    # What linters and tests need includes all that others do.
    stamps="$(cat "$stamp-$EPP_EXTRAS" "$stamp-dev" 2>/dev/null || true)"
    if grep -qxF "$wanted" <<<"$stamps"; then return; fi
    EPP_UV="$(epp_find_uv)"
    epp_say "Installing megatron-epp and what it needs into .venv with ${EPP_UV:-pip} (a minute or two the first time)"
    epp_has_gpu || epp_add_cpu_torch
    if ! epp_add --editable "${EPP_ROOT}[$EPP_EXTRAS]"; then
        if [ -z "$EPP_UV" ]; then return 1; fi
        epp_say "uv cannot install it, see above: trying pip"
        EPP_UV="" epp_add --editable "${EPP_ROOT}[$EPP_EXTRAS]"
    fi
    printf '%s\n' "$wanted" >"$stamp-$EPP_EXTRAS"
}

epp_make_venv
epp_install
export PATH="$EPP_VENV/bin:$PATH"
cd "$EPP_ROOT"
