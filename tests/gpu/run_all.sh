#!/usr/bin/env bash
# Everything a card can say about the kernels, in 9 minutes at most: the suite, the times, the sanitizer.
#
#   bash tests/gpu/run_all.sh [FOLDER]        results: FOLDER, or tests/gpu_results
#
# A bare machine will do: Python with torch (CUDA) and triton; no network, no installation, pytest if it is there.
# PYTHON names another interpreter. The exit code says whether anything failed; what does not start here is said, and is
# no failure. A rehearsal without a card: DGEMMA_GPU_SUITE_SMALL=1 bash tests/gpu/run_all.sh SOME_FOLDER
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
folder=${1:-tests/gpu_results}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset DGEMMA_OPS
if [[ ${DGEMMA_GPU_SUITE_SMALL:-} == 1 ]]; then export TRITON_INTERPRET=1; else unset TRITON_INTERPRET; fi
SUITE_SECONDS=${SUITE_SECONDS:-280} TIMES_SECONDS=${TIMES_SECONDS:-100} SANITIZER_SECONDS=${SANITIZER_SECONDS:-50}
# compiled code is shared by the three, and gone afterwards
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache}

stem=$("$PYTHON" tests/gpu/times.py --stem) || exit 1
if [[ ${DGEMMA_GPU_SUITE_SMALL:-} == 1 && $(realpath -m "$folder")/ == "$PWD/tests/gpu_results/"* ]]; then
  echo "a rehearsal measures nothing, and does not write to $folder: name another folder"
  exit 2
fi
mkdir -p "$folder"
failed=()
began=$SECONDS

part() { # name, seconds, command …: its output to a log and its end to the screen
  local name=$1 seconds=$2 log="$folder/$stem-$1.txt" start=$SECONDS code
  shift 2
  echo "── $name"
  timeout --kill-after=10 "$seconds" "$@" >"$log" 2>&1
  code=$?
  tail -n "${SHOWN:-25}" "$log"
  [[ $code == 124 || $code == 137 ]] && echo "$name: stopped after $seconds s" | tee -a "$log"
  echo "$name: exit code $code, $((SECONDS - start)) s, $log"
  ((code == 0)) || failed+=("$name")
}

part suite "$SUITE_SECONDS" "$PYTHON" tests/gpu/run.py
SHOWN=120 part times "$TIMES_SECONDS" "$PYTHON" tests/gpu/times.py --out "$folder/$stem.json"

# The sanitizer sees single allocations, not torch's pool: a kernel that leaves its tensor leaves an allocation.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
if [[ ${DGEMMA_GPU_SUITE_SMALL:-} == 1 ]]; then
  SHOWN=3 part launches "$SANITIZER_SECONDS" "$PYTHON" tests/gpu/run.py --launch --seconds=$((SANITIZER_SECONDS / 2))
elif [[ -z $sanitizer ]]; then
  echo "── sanitizer: not run, there is no compute-sanitizer on this machine"
elif ! timeout 30 "$sanitizer" --error-exitcode 9 "$PYTHON" -c "import torch; torch.zeros(1).cuda()" \
  >"$folder/$stem-sanitizer.txt" 2>&1; then
  echo "── sanitizer: not run, compute-sanitizer does not start on this machine:"
  tail -n 5 "$folder/$stem-sanitizer.txt"
else
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck; do
    SHOWN=6 part "$tool" "$SANITIZER_SECONDS" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
      "$PYTHON" tests/gpu/run.py --launch --seconds=$((SANITIZER_SECONDS / 2))
  done
fi

echo "── $((SECONDS - began)) s in all"
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "nothing failed"
