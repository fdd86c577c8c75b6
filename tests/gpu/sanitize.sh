#!/usr/bin/env bash
# Run the GPU tests under compute-sanitizer: memcheck over all of them, racecheck over those of the kernels.
# Of the certified selection's tests, those with large shapes and many random rows are left out: they take hours.
#
#     tests/gpu/sanitize.sh [LOG_DIRECTORY]
#
# Prints one line a run and exits 1 unless all are clean. Failed driver calls are not reported: the tests
# provoke them; tests that start processes of their own, some of which fault on purpose, run those outside.
set -u
cd "$(dirname "$0")/../.."
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
export NXRT_REQUIRE_CUDA=1

check() { # tool, name, pytest arguments
  local tool=$1 name=$2 log
  shift 2
  log=$logs/$tool-$name.log
  if compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no --target-processes application-only \
    python3 -m pytest -q -p no:cacheprovider "$@" >"$log" 2>&1; then
    echo "$tool $name: clean, $(grep -E '^[0-9]+ passed' "$log")"
  else
    echo "$tool $name: NOT CLEAN, see $log"
    touch "$logs/failed"
  fi
}

rm -f "$logs/failed"
check memcheck attention tests/gpu/test_attention_gpu.py &
check memcheck dsa tests/gpu/test_dsa_gpu.py &
check memcheck certified tests/gpu/test_dsa_certified_gpu.py -k "small_shapes or chunks" &
check memcheck rest tests/gpu --ignore tests/gpu/test_attention_gpu.py --ignore tests/gpu/test_dsa_gpu.py \
  --ignore tests/gpu/test_dsa_certified_gpu.py --ignore tests/gpu/test_speed_gpu.py &
check racecheck attention tests/gpu/test_attention_gpu.py &
check racecheck dsa tests/gpu/test_dsa_gpu.py &
check racecheck certified tests/gpu/test_dsa_certified_gpu.py -k "small_shapes or chunks" &
wait
[ ! -e "$logs/failed" ]
