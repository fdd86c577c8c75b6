#!/usr/bin/env bash
# Run GPU tests under compute-sanitizer: memcheck and racecheck over the kernels, memcheck over graphs and streams.
#
#     tests/gpu/sanitize.sh [WORKERS] [LOG_DIRECTORY]
#
# WORKERS processes, which need pytest-xdist where they are more than one, share the attention tests of a tool, half as
# many each other run. Left out is what repeats a kernel and its features in other sizes, which takes hours, and what
# measures time or device memory, which other processes take as well. Failed driver calls are not reported: the tests
# provoke them. Nor are the host's backtraces taken: they keep every Python frame that launched a kernel, and the
# tensors in it, while tests look at what becomes of dropped ones. A worker under racecheck may take 14 GB of the host's
# memory, so the tools follow each other. Prints one line a run; exits 1 unless all are clean and all tests passed.
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

attention="oracle_cases or all_combinations or poison or lengths or numbers_without or on_the_portable or each_variant"

check() { # tool, name, workers, pytest arguments
  local tool=$1 name=$2 log=$logs/$1-$2.log status errors side_by_side=()
  if (($3 > 1)); then side_by_side=(-n "$3" --dist worksteal); fi
  compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no --show-backtrace device \
    --target-processes all \
    python3 -m pytest -v -p no:cacheprovider -p no:benchmark "${side_by_side[@]}" "${@:4}" >"$log" 2>&1
  status=$?
  errors=$(grep -E '^=+ (ERROR|RACECHECK) SUMMARY' "$log")
  echo "$tool $name: $(grep -oE '[0-9]+ (passed|failed).*[0-9]s' "$log"); ${errors#========= }"
  if ((status != 0)) || [[ $errors != *" 0 "* ]]; then touch "$logs/failed"; fi
}

kernels() { # tool
  check "$1" attention "$workers" tests/gpu/test_attention_gpu.py -k "$attention" &
  check "$1" dsa $((workers / 2)) tests/gpu/test_dsa_gpu.py &
  check "$1" certified $((workers / 2)) tests/gpu/test_dsa_certified_gpu.py -k "small_shapes or chunks or in_a_graph" &
}

rm -f "$logs/failed"
kernels memcheck
check memcheck graphs $((workers / 2)) tests/gpu/test_rebind_gpu.py tests/gpu/test_engine_gpu.py \
  tests/gpu/test_streams_gpu.py -k "not side_by_side and not freeing_waits and not leak_no_device_memory" &
wait
kernels racecheck
wait
[ ! -e "$logs/failed" ]
