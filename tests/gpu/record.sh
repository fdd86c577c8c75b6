#!/usr/bin/env bash
# Run the GPU tests and record them in last_run.json: first those that may share the device, then those that measure
# time or the device's memory, one by one.
#
#     tests/gpu/record.sh [WORKERS] [LOG_DIRECTORY]
#
# More than one worker needs pytest-xdist. Prints one line a half and exits 1 unless both passed.
set -u
cd "$(dirname "$0")/../.."
workers=${1:-1}
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export NXRT_REQUIRE_CUDA=1 NXRT_TEST_CACHE_DIR=${NXRT_TEST_CACHE_DIR:-$cache}
# The oracles multiply small matrices: threads of many workers' BLAS, spinning, slow them tenfold and more.
export OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
side_by_side=()
if ((workers > 1)); then side_by_side=(-n "$workers" --dist worksteal); fi

half() { # name, pytest arguments
  local log=$logs/$1.log
  if python3 -m pytest -v -p no:cacheprovider -p no:benchmark -o faulthandler_timeout=60 --record tests/gpu "${@:2}" \
    >"$log" 2>&1; then
    echo "$1: $(grep -oE '[0-9]+ passed.*[0-9]s' "$log")"
  else
    echo "$1: NOT GREEN, see $log"
    grep -E '^(FAILED|ERROR)|(passed|failed).* in ' "$log"
    return 1
  fi
}

half together -m "not alone" "${side_by_side[@]}" && half alone -m alone
