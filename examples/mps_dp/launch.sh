#!/usr/bin/env bash
# Several servers on one GPU: launch.sh up | verify [RUN_ID] | list | down RUN_ID
#
# A thin shell over `sgl-omni dp`, which see (`sgl-omni dp up --help`). Environment, for `up` unless it says otherwise:
#   CONFIG or MODEL    one of the two: a YAML file, or a model id or folder
#   N                  servers
#   GPU_ID             0
#   CORE_BLOCKS        "0-9 10-19": physical cores of each; the node's, split evenly
#   NUMA_NODE          the GPU's, where the machine tells it
#   MAX_TOTAL_TOKENS   KV capacity of each, in place of what CONFIG pins
#   MF                 mem_fraction_static of each
#   BASE_PORT          free ports
#   WEIGHT_SHARE       0; with 1 all servers use one set of engine weights, which the first one loads
#   PLATFORM           cuda; cpu runs without a GPU
#   MPS                on for a GPU; off lets the servers take turns on it
#   STATE_ROOT         (all commands) where runs are recorded
# What follows `up` goes to `sgl-omni dp up`: --parallel-start, or any key of the configuration.
set -euo pipefail

command=${1:-}
shift || true
arguments=()

option() {
    if [[ -n $2 ]]; then arguments+=("$1" "$2"); fi
}

option --state-root "${STATE_ROOT:-}"
case $command in
    up)
        option --config "${CONFIG:-}"
        option --model-path "${MODEL:-}"
        option --replicas "${N:-1}"
        option --gpu "${GPU_ID:-}"
        option --core-blocks "${CORE_BLOCKS:-}"
        option --numa-node "${NUMA_NODE:-}"
        option --max-total-tokens "${MAX_TOTAL_TOKENS:-}"
        option --mem-fraction-static "${MF:-}"
        option --base-port "${BASE_PORT:-}"
        option --platform "${PLATFORM:-}"
        option --mps "${MPS:-}"
        case ${WEIGHT_SHARE:-0} in
            0 | off) ;;
            1 | on) arguments+=(--weight-share on) ;;
            *) echo "launch.sh: WEIGHT_SHARE is 0 or 1, not '$WEIGHT_SHARE'" >&2; exit 2 ;;
        esac
        ;;
    verify | list | down) ;;
    *)
        echo "usage: launch.sh up | verify [RUN_ID] | list | down RUN_ID" >&2
        exit 2
        ;;
esac
exec sgl-omni dp "$command" ${arguments[@]+"${arguments[@]}"} "$@"
