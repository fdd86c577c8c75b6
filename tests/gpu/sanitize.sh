#!/usr/bin/env bash
# Run the GPU tests under compute-sanitizer: memcheck over all of them, racecheck over those of the kernels.
# Of the certified selection's tests, those with large shapes and many random rows are left out: they take hours.
#
#     tests/gpu/sanitize.sh [WORKERS] [LOG_DIRECTORY]
#
# More than one worker, of each run of a kernel's tests, needs pytest-xdist. Prints one line a run and exits 1 unless all
# are clean. Failed driver calls are not reported: the tests provoke them. Tests of the runtime start processes of their
# own, some of which fault on purpose: those run outside.
set -u
cd "$(dirname "$0")/../.."
workers=${1:-1}
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export NXRT_REQUIRE_CUDA=1 NXRT_TEST_CACHE_DIR=${NXRT_TEST_CACHE_DIR:-$cache}
side_by_side=()
if ((workers > 1)); then side_by_side=(-n "$workers" --dist worksteal); fi

check() { # tool, name, processes, pytest arguments
  local tool=$1 name=$2 processes=$3 log=$logs/$1-$2.log
  if compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no --target-processes "$processes" \
    python3 -m pytest -q -p no:cacheprovider -p no:benchmark "${@:4}" >"$log" 2>&1; then
    echo "$tool $name: clean, $(grep -E '^[0-9]+ passed' "$log")"
  else
    echo "$tool $name: NOT CLEAN, see $log"
    touch "$logs/failed"
  fi
}

kernels() { # tool
  check "$1" attention all "${side_by_side[@]}" tests/gpu/test_attention_gpu.py &
  check "$1" dsa all "${side_by_side[@]}" tests/gpu/test_dsa_gpu.py &
  check "$1" certified all "${side_by_side[@]}" tests/gpu/test_dsa_certified_gpu.py -k "small_shapes or chunks" &
}

rm -f "$logs/failed"
kernels memcheck
kernels racecheck
check memcheck runtime application-only tests/gpu --ignore tests/gpu/test_speed_gpu.py \
  --ignore tests/gpu/test_attention_gpu.py --ignore tests/gpu/test_dsa_gpu.py --ignore tests/gpu/test_dsa_certified_gpu.py &
wait
[ ! -e "$logs/failed" ]
