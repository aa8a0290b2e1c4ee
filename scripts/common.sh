#!/usr/bin/env bash
# Sourced by the other scripts: finds a Python 3.12 or newer, makes .venv and installs the package into it.
# Safe to run again and again: what is already done is not done twice, and what broke half-way is done again.
#
# Settings (environment):
#   EPP_PYTHON   make .venv with this Python (3.12 or newer) instead of the first that is found

set -euo pipefail

EPP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
EPP_VENV="$EPP_ROOT/.venv"
EPP_TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

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

# Without an NVIDIA driver the CUDA build of torch is gigabytes for nothing. The CPU build has an index of its own,
# which not every network reaches: then the default build serves too.
epp_wants_cpu_torch() {
    if [ "$(uname -s)" != Linux ] || [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1; then return 1; fi
    "$EPP_VENV/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=5)' \
        "$EPP_TORCH_CPU_INDEX" >/dev/null 2>&1
}

epp_pip_install() {
    "$EPP_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$EPP_ROOT/scripts/constraints.txt" "$@"
}

epp_install() {
    local stamp="$EPP_VENV/.megatron-epp-installed" wanted
    wanted="$(cd "$EPP_ROOT" && { printf '%s\n' "$EPP_ROOT" && cat setup.py pyproject.toml scripts/constraints.txt; } | cksum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    epp_say "Installing megatron-epp and what it needs into .venv (minutes the first time)"
    if epp_wants_cpu_torch; then epp_pip_install torch --extra-index-url "$EPP_TORCH_CPU_INDEX"; fi
    epp_pip_install --editable "${EPP_ROOT}[dev,viz]"
    printf '%s\n' "$wanted" >"$stamp"
}

epp_make_venv
epp_install
export PATH="$EPP_VENV/bin:$PATH"
cd "$EPP_ROOT"
