#!/usr/bin/env bash
# Everything that is worth measuring on a GPU, in eight minutes at most.
#
#     benchmarks/gpu_visit.sh visit.jsonl wheels
#
# For a bare machine with torch, transformers and triton. The second argument is a folder of wheels,
# this project's own among them (docs/gpu.md), which are installed offline into a temporary folder.
# Each part is a group of processes with a time limit, and ends when that is over or the whole time
# (VISIT_SECONDS) is spent; a part that fails costs the others nothing. Rows are added to the file as
# they are measured, as lines of JSON: those of a part, then one of the kind `part` that says how it
# ended, with the end of its output. The limits of the parts add up to more than the whole: they stop
# a part that hangs, and the last parts are left out if the time is spent. QUICK=1 runs toy sizes, on
# a CPU too. The status is 1 if a part failed or was stopped.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(realpath "${1:?a file that rows are added to}") wheels=${2:-}
end=$((SECONDS + ${VISIT_SECONDS:-480})) failures=0 running=
home=$(mktemp -d -t recsys-visit-XXXXXX)
trap 'rm -rf "$home"' EXIT
trap 'trap "" TERM HUP INT; [ -z "$running" ] || kill -KILL -- "-$running"; exit 1' TERM HUP INT
# The folder of the parts is the checkout, whose packages are not those of a wheel.
export RECSYS_HOME=$home PYTHONSAFEPATH=1 PYTHONPATH="$home/site:$here${PYTHONPATH:+:$PYTHONPATH}"

# part NAME SECONDS ARGUMENTS...: run Python, and add a row.
part() {
    local name=$1 limit=$2 left=$((end - SECONDS)) start=$SECONDS code=0 status=ended
    shift 2
    : >"$home/log"
    if ((left < 5)); then
        status=skipped
    else
        limit=$((left < limit ? left : limit))
        (cd "$here/.." && exec timeout -s KILL "$limit" python "$@") >"$home/log" 2>&1 &
        running=$!
        wait "$running" || code=$?
        kill -KILL -- "-$running" 2>/dev/null # what the part has started
        running=
        ((code == 0)) || status=failed
        ((code != 137)) || status=stopped
    fi
    [ "$status" = ended ] || failures=$((failures + 1))
    python "$here/gpu_rows.py" "$out" "$home/log" kind=part part="$name" status="$status" \
        seconds=$((SECONDS - start)) limit="$limit" code="$code"
}

# gpu NAME SECONDS OPTIONS...: a part of gpu.py.
gpu() {
    local toy="--model tiny --quick --cases cold:1 --beams 5 --history 6 --items 300 --rounds 2"
    # shellcheck disable=SC2086 # several words
    part "$1" "$2" "$here/gpu.py" "${@:3}" ${QUICK:+$toy} --out "$out"
}

# All parts, the most important ones first.
visit() {
    local ways="graphs decode-graph draft draft-graph" few=() sizes=() setting
    local cases="cold:1 kept:1 cold:32 kept:32" bundle=$home/bundles/demo
    if [ -n "${QUICK:-}" ]; then
        few=(--requests 50 --clients 4)
        for setting in data.synthetic.users=60 data.synthetic.items=240 sasrec.epochs=1 \
            sasrec.min_steps=0 target.epochs=1 draft.epochs=1 draft.objective=sft; do
            sizes+=(--set "$setting")
        done
    fi
    # shellcheck disable=SC2086 # several words
    {
        [ -z "$wheels" ] || part install 60 -m pip install -q --no-index --no-deps \
            --target "$home/site" "$(realpath "$wheels")"/*.whl
        part tests 60 -m pytest -q -p no:cacheprovider -m gpu \
            tests/recsys/test_{graphs,captured,captured_drafts,level_kernel}.py
        gpu float32 40 --quick --float32 --cases cold:1 kept:3 # all ways
        gpu 1.1B 70 --model 1.1B --cases $cases --ways $ways --rounds 10
        gpu 7B 110 --model 7B --cases $cases --ways $ways --rounds 10
        part quickstart 90 -m recsys quickstart --name demo "${sizes[@]}"
        # The service is measured all the same.
        [ -d "$bundle" ] || CUDA_VISIBLE_DEVICES='' part "quickstart without the GPU" 90 \
            -m recsys quickstart --name demo "${sizes[@]}"
        part service 60 "$here/gpu_service.py" "$bundle" --out "$out" "${few[@]}"
        set -- --cases cold:1 --ways graphs decode-graph --rounds 10
        gpu "1.1B, wide" 70 --model 1.1B --beams 20 256 --history 50 250 "$@"
        gpu "10 million items" 70 --model 1.1B --items 10000000 "$@"
        gpu "7B, wide" 80 --model 7B --beams 256 --history 50 250 "$@"
    }
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    visit
    ((failures == 0)) || { echo "$failures parts failed, or were stopped or left out" >&2; exit 1; }
fi
