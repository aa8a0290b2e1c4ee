#!/usr/bin/env bash
# Finds out what one GPU can prove: bash scripts/gpu_kit.sh
#
# Runs one command after the other, each for at most ten minutes, and goes on when one fails. torch, numpy and this checkout are
# enough: nothing is installed and no network is used. Parts that need pytest or Megatron are left out where these are missing,
# and the report says so. Each command's output is in FOLDER/NAME.txt, its figures under FOLDER/NAME; FOLDER/report.json and
# report.txt have the machine, all versions, and the result of each. The exit code is 1 if a command failed.
#
#   --output FOLDER   where results go (default: runs/gpu-kit)
#   --steps A,B       only these commands
#   --reduced         everything tiny; so it is on a machine without a GPU, where it only shows that commands run
#   --dry-run         print the commands
#
# Settings (environment):
#   EPP_PYTHON      Python with torch (default: .venv of this checkout, or else python3)
#   EPP_KIT_LIMIT   seconds that a command may take (default: 600)

set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
folder=runs/gpu-kit steps="" reduced=() dry_run=""
while [ $# -gt 0 ]; do
    case "$1" in
        --output | --steps)
            [ $# -gt 1 ] || { printf '%s needs a value\n' "$1" >&2; exit 2; }
            if [ "$1" = --output ]; then folder="$2"; else steps=",$2,"; fi
            shift
            ;;
        --reduced) reduced=(--reduced) ;;
        --dry-run) dry_run=yes ;;
        *)
            printf 'unknown option %s; the first lines of %s list them\n' "$1" "$0" >&2
            exit 2
            ;;
    esac
    shift
done

python="${EPP_PYTHON:-}"
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
"$python" -c 'import numpy, torch' 2>/dev/null || {
    printf '%s has no torch or no numpy: set EPP_PYTHON to a Python that has both\n' "$python" >&2
    exit 2
}
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || reduced=(--reduced)
has() { "$python" -c "import importlib.util as u; raise SystemExit(u.find_spec('$1') is None)" >/dev/null 2>&1; }

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
limit="${EPP_KIT_LIMIT:-600}"
expandable=(env "PYTORCH_ALLOC_CONF=expandable_segments:True" "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
fixed=(env -u PYTORCH_ALLOC_CONF -u PYTORCH_CUDA_ALLOC_CONF)
epp=("$python" -m megatron_epp.cli.main)
device=("$python" -m scripts.bench.device "${reduced[@]}")
training=("$python" -m scripts.bench.gpu --limit "$limit" "${reduced[@]}")
failed=0

record() { printf '%s\t%s\t%s\t%s\n' "$@" >>"$folder/steps.tsv"; }

# NAME COMMAND...: runs it, unless --steps leaves it out.
step() {
    local name="$1" start code=0
    shift
    if [ -n "$steps" ] && [[ "$steps" != *",$name,"* ]]; then return; fi
    if [ -n "$dry_run" ]; then
        printf '%-18s timeout %s %s\n' "$name" "$limit" "$*"
        return
    fi
    printf '%s ... ' "$name"
    start=$SECONDS
    timeout --kill-after 20 "$limit" "$@" >"$folder/$name.txt" 2>&1 || code=$?
    printf 'exit code %s, %s s\n' "$code" $((SECONDS - start))
    [ "$code" = 0 ] || failed=1
    record "$name" "$code" $((SECONDS - start)) "$*"
}

# NAME REASON: a command that this machine cannot run.
without() {
    if [ -n "$steps" ] && [[ "$steps" != *",$1,"* ]]; then return; fi
    printf '%-18s left out: %s\n' "$1" "$2"
    [ -n "$dry_run" ] || record "$1" "" 0 "left out: $2"
}

# NAME FILE...: tests that need a GPU.
tests() {
    local name="$1"
    shift
    if [ ${#reduced[@]} -gt 0 ]; then
        without "$name" "it needs a GPU, and the full sizes"
    elif ! has pytest; then
        without "$name" "pytest is not installed"
    else
        step "$name" "${expandable[@]}" "$python" -m pytest -q -rs -p no:cacheprovider "--junitxml=$folder/$name/tests.xml" "${@/#/tests/gpu/test_gpu_}"
    fi
}

if [ -z "$dry_run" ]; then
    mkdir -p "$folder"
    : >"$folder/steps.tsv"
fi
step doctor "${epp[@]}" doctor --json
for part in kernels executor copies; do step "$part" "${expandable[@]}" "${device[@]}" --parts "$part" -o "$folder/$part"; done
step memory "${expandable[@]}" "${device[@]}" --parts memory -o "$folder/memory"
step memory-fixed "${fixed[@]}" "${device[@]}" --parts memory -o "$folder/memory-fixed"
tests tests-attention attention.py
tests tests-executor executor.py queues.py block_loss.py first_run.py
sizes=(--model llama3-8b)
if [ ${#reduced[@]} -gt 0 ]; then sizes=(--model tiny-gpt --tokens "64,128" --prefixes "0,128"); fi
step profile "${expandable[@]}" "${epp[@]}" profile "${sizes[@]}" -o "$folder/profile.json"
if has megatron.core; then
    step first-run "${expandable[@]}" "${epp[@]}" first-run --steps links,kernels,parity,plan "${reduced[@]}" -o "$folder/first-run"
    for part in parity peaks slices race copies; do  # `long` takes longer than a step may
        step "training-$part" "${expandable[@]}" "${training[@]}" --parts "$part" -o "$folder/training-$part"
    done
    step alone "${expandable[@]}" "$python" -W ignore -m scripts.bench.alone --seconds 400 "${reduced[@]}" -o "$folder/alone"
    tests tests-megatron caps.py links.py delayed.py training.py pipeline.py
else
    for part in first-run training-{parity,peaks,slices,race,copies} alone tests-megatron; do
        without "$part" "Megatron is not installed"
    done
fi
[ -n "$dry_run" ] || "$python" -m scripts.bench.device.kit_report "$folder" || failed=1
exit "$failed"
