#!/usr/bin/env bash
# Trains on this machine, which may be one node of several.
#
#   bash scripts/train.sh -c recipes/tiny-cpu train_iters=2 data_path=documents/text    YAML settings, see `megatron-epp train`
#   bash scripts/train.sh --num-layers 32 --hidden-size 4096 ... --epp                   Megatron's own flags
#   bash scripts/train.sh --dry-run ...                                                  print the command, start nothing
#
# Knobs (environment):
#   NNODES, NPROC_PER_NODE     nodes (1), and processes on each (one per GPU)
#   NODE_RANK                  of this node (0); node 0 hosts torchrun's rendezvous
#   MASTER_ADDR, MASTER_PORT   where the nodes reach node 0 (127.0.0.1, 29500)
#   WAIT_SECONDS               how long nodes wait for each other to come up (300)
#   TORCHRUN_ARGS              more options of torchrun, which take precedence: --max-restarts 2, --rdzv-backend etcd-v2, ...
#   EPP_SCRIPT                 a pretrain_gpt.py of your own, where flags are given (ours)
# Uses the environment that `megatron-epp` is found in; without one it makes .venv.

set -euo pipefail

if ! command -v megatron-epp >/dev/null 2>&1; then
    # shellcheck source=scripts/common.sh
    source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
fi

dry_run=()
if [ "${1:-}" = --dry-run ]; then
    dry_run=(--dry-run)
    shift
fi

case "${1:-}" in
-c | --config) exec megatron-epp train "${dry_run[@]}" "$@" ;;
'' | -h | --help)
    sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

script=(-m megatron_epp.mcore.pretrain_gpt)
if [ -n "${EPP_SCRIPT:-}" ]; then script=(-m megatron_epp.run "$EPP_SCRIPT"); fi
where=(--nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-gpu}")
if [ "${NNODES:-1}" = 1 ]; then
    where+=(--standalone --local-addr 127.0.0.1)
else # torch would guess the host by the machine's names, and join whatever else listens there if the port is taken
    is_host=0
    if [ "${NODE_RANK:-0}" = 0 ]; then is_host=1; fi
    where+=(--rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29500}")
    where+=(--rdzv-conf "is_host=$is_host,join_timeout=${WAIT_SECONDS:-300},read_timeout=${WAIT_SECONDS:-300}")
fi
read -ra more <<<"${TORCHRUN_ARGS:-}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "${#dry_run[@]}" -eq 0 ] && [ -z "${NPROC_PER_NODE:-}" ] && ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch finds no GPU here to count: set NPROC_PER_NODE to the number of processes" >&2
    exit 2
fi
command=(python -m megatron_epp.tools.launch.torchrun "${where[@]}" "${more[@]}" "${script[@]}" "$@")
printf '%q ' "${command[@]}"
printf '\n'
if [ "${#dry_run[@]}" -gt 0 ]; then exit 0; fi
exec "${command[@]}"
