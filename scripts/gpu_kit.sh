#!/usr/bin/env bash
# Finds out what one GPU can prove: bash scripts/gpu_kit.sh
#
# Runs one command after the other, each with a limit, the most telling first, and goes on when one fails. What measures no time
# runs side by side on a GPU of 70 GB or more. torch, numpy and this checkout are enough: nothing is installed and no network is
# used. Parts that need pytest or Megatron are left out where these are missing, and the report says so. Each command's output is
# in FOLDER/NAME.txt, its figures under FOLDER/NAME, written as they come; FOLDER/report.json and report.txt have the machine, all
# versions, and the result of each. A second run in the same folder adds to them. The exit code is 1 if a command failed.
#
#   --output FOLDER   where results go (default: runs/gpu-kit)
#   --steps A,B       only these commands
#   --seconds S       end by then, and name what is left (default: when all have run, an hour or two)
#   --reduced         everything tiny; so it is on a machine without a GPU, where it only shows that commands run
#   --dry-run         print the commands
#
# Settings (environment):
#   EPP_PYTHON      Python with torch (default: .venv of this checkout, or else python3)
#   EPP_KIT_LIMIT   most seconds that a command may take (default: 600)

set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
folder=runs/gpu-kit steps="" seconds=1000000 shares=yes reduced=() dry_run=""
while [ $# -gt 0 ]; do
    case "$1" in
        --output | --steps | --seconds)
            [ $# -gt 1 ] || { printf '%s needs a value\n' "$1" >&2; exit 2; }
            case "$1" in
                --output) folder="$2" ;;
                --steps) steps=",$2," ;;
                --seconds) seconds="$2" ;;
            esac
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
# Trainings share a GPU only where it is large.
"$python" -c 'import torch; raise SystemExit(torch.cuda.mem_get_info()[1] < 70e9)' 2>/dev/null || shares=""
has() { "$python" -c "import importlib.util as u; raise SystemExit(u.find_spec('$1') is None)" >/dev/null 2>&1; }

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
most="${EPP_KIT_LIMIT:-600}"
fixed=(env -u PYTORCH_ALLOC_CONF -u PYTORCH_CUDA_ALLOC_CONF)
epp=("$python" -m megatron_epp.tools.cli.main)
failed="$folder/failed" left="$folder/left"

wanted() { [ -z "$steps" ] || [[ "$steps" == *",$1,"* ]]; }

# A line of steps.tsv, which replaces that of an earlier run in the same folder.
record() {
    (
        flock 9
        grep -v -- "^$1"$'\t' "$folder/steps.tsv" >"$folder/steps.part"
        printf '%s\t%s\t%s\t%s\n' "$@" >>"$folder/steps.part"
        mv "$folder/steps.part" "$folder/steps.tsv"
    ) 9>"$folder/lock"
}

# NAME LIMIT COMMAND...: runs it, for at most so many seconds and no longer than there are.
perform() {
    local name="$1" limit="$2" start=$SECONDS code=0
    shift 2
    [ "$limit" -le "$most" ] || limit="$most"
    [ "$limit" -le $((seconds - SECONDS)) ] || limit=$((seconds - SECONDS))
    printf '%s: at most %s s\n' "$name" "$limit"
    timeout --kill-after 20 "$limit" "$@" >"$folder/$name.txt" 2>&1 </dev/null || code=$?
    printf '%s: exit code %s, %s s\n' "$name" "$code" $((SECONDS - start))
    [ "$code" = 0 ] || touch "$failed"
    record "$name" "$code" $((SECONDS - start)) "$*"
}

# NAME LIMIT COMMAND...: the next command, unless --steps leaves it out or there is no time.
step() {
    wanted "$1" || return 0
    if [ -n "$dry_run" ]; then
        printf '%-18s timeout %s %s\n' "$1" "$2" "${*:3}"
    elif [ $((seconds - SECONDS)) -lt 20 ]; then
        printf '%s\n' "$1" >>"$left"
    else
        perform "$@"
    fi
}

# NAME LIMIT COMMAND...: one that measures no time, next to others until `wait`, where the GPU is large.
parallel() {
    if [ -z "$shares" ] || [ -n "$dry_run" ]; then step "$@"; else step "$@" & fi
}

# NAME REASON: a command that this machine cannot run.
without() {
    wanted "$1" || return 0
    printf '%-18s left out: %s\n' "$1" "$2"
    [ -n "$dry_run" ] || record "$1" "" 0 "left out: $2"
}

# NAME LIMIT FILE...: tests that need a GPU.
tests() {
    local name="$1" limit="$2"
    shift 2
    if [ ${#reduced[@]} -gt 0 ]; then
        without "$name" "it needs a GPU, and the full sizes"
    elif ! has pytest; then
        without "$name" "pytest is not installed"
    else
        parallel "$name" "$limit" "$python" -m pytest -q -rs -p no:cacheprovider "--junitxml=$folder/$name/tests.xml" "${@/#/tests/gpu/test_gpu_}"
    fi
}

if [ -z "$dry_run" ]; then
    mkdir -p "$folder"
    touch "$folder/steps.tsv"
    rm -f "$failed" "$left"
fi
if has megatron.core; then
    training() { # NAME LIMIT: a part of the benchmark of trainings
        "$how" "$1" "$2" "${plain[@]}" "$python" -W ignore -m scripts.bench.gpu --limit "$2" "${reduced[@]}" --only "$1" -o "$folder/$1"
    }
    megatron() { "$@"; }
else
    training() { without "$1" "Megatron is not installed"; }
    megatron() { without "$2" "Megatron is not installed"; }
fi
device() { # NAME LIMIT PARTS COMMAND...: parts of the benchmark that needs torch alone
    "$how" "$1" "$2" "${@:4}" "$python" -m scripts.bench.device "${reduced[@]}" --only "$3" -o "$folder/$1"
}

# The planner's inner loops compile for half a minute, once a checkout. Plans of a few documents do without.
how=parallel plain=(env MEGATRON_EPP_COMPILED=0)
parallel planner 150 "${epp[@]}" plan --model llama3-8b --stages 2 --lengths 2400,300,88,900,150 --offload --split-weight
training ranks-1 280
training parity 280
training peaks 280
parallel doctor 150 "${epp[@]}" doctor --json
device kernels 150 kernels
device executor 150 executor
tests tests-attention 280 attention.py
tests tests-executor 280 executor.py block_loss.py
megatron tests tests-megatron 280 links.py delayed.py
wait

how=step plain=()
sizes=(--model llama3-8b) costs=() layers=local
if [ ${#reduced[@]} -gt 0 ]; then sizes=(--model tiny-gpt --tokens "64,128" --prefixes "0,128"); fi
step profile 170 "${epp[@]}" profile "${sizes[@]}" -o "$folder/profile.json"
training slices 240
if has transformer_engine; then layers=te; fi
if [ ${#reduced[@]} = 0 ] && [ -f "$folder/profile.json" ]; then costs=(--costs "$folder/profile.json"); fi
alone=(-m scripts.bench.alone --layers "$layers" --seconds 270 "${costs[@]}" "${reduced[@]}")
megatron step alone 330 "$python" -W ignore "${alone[@]}" -o "$folder/alone"
training race 400
training copies 240
device memory 240 copies,memory
device memory-fixed 150 memory "${fixed[@]}"
tests tests-queues 200 queues.py
megatron tests tests-training 400 training.py
wait

# A rank takes a processor's core to start: pipelines of two and of four ranks come one after the other.
how=parallel plain=(env MEGATRON_EPP_COMPILED=0)
training ranks-2 400
training loops 280
wait
training ranks-4 400
megatron parallel first-run 280 "${plain[@]}" "${epp[@]}" first-run --steps links,parity,plan "${reduced[@]}" -o "$folder/first-run"
wait

if [ -z "$dry_run" ]; then
    [ ! -e "$left" ] || printf 'no time for: bash scripts/gpu_kit.sh --output %s --steps %s\n' "$folder" "$(paste -sd, "$left")"
    "$python" -m scripts.bench.kit_report "$folder" || touch "$failed"
    [ ! -e "$failed" ] || exit 1
fi
