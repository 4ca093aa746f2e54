#!/usr/bin/env bash
# Everything a card can say, in 9 minutes at most: the suite, the 26B model of random weights, its kernels one by one.
#
#   bash tests/gpu/run_all.sh [FOLDER]        results: FOLDER, or tests/gpu_results
#
# A bare machine will do: Python with torch (CUDA) and triton; no network, no installation, pytest if it is there.
# PYTHON names another interpreter. Each part has seconds of its own and ends with them; whatever was measured until
# then is in FOLDER/CARD-DATE.json and, as tables, in FOLDER/CARD-DATE.md, also when parts failed or Ctrl-C came. The
# exit code says whether anything failed; what does not fit this card or does not start here is said, and is no failure.
# A rehearsal without a card, small, measuring nothing: DGEMMA_GPU_SUITE_SMALL=1 bash tests/gpu/run_all.sh FOLDER
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
folder=${1:-tests/gpu_results}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset DGEMMA_OPS
small=${DGEMMA_GPU_SUITE_SMALL:-}
if [[ $small == 1 ]]; then export TRITON_INTERPRET=1; else unset TRITON_INTERPRET; fi
# a first bench compiles, the second finds it compiled; in all 515 s
SUITE_SECONDS=${SUITE_SECONDS:-120} BENCH_SECONDS=${BENCH_SECONDS:-70} AGAIN_SECONDS=${AGAIN_SECONDS:-40}
SWEEP_SECONDS=${SWEEP_SECONDS:-40} LONG_SWEEP_SECONDS=${LONG_SWEEP_SECONDS:-55} TIMES_SECONDS=${TIMES_SECONDS:-40}
SANITIZER_SECONDS=${SANITIZER_SECONDS:-50}
ALL_SECONDS=${ALL_SECONDS:-520} # of 540: what does not heed the end gets 10 more, and the tables take a second
LEAST_SECONDS=${LEAST_SECONDS:-15} # that a part is begun for
# 32k is measured by itself, so that a card too slow for 256k has a sweep at all
SWEEP_CONTEXT=33280 LONG_CONTEXT=262144 RUNS=3 fixed=(--protocol fixed16,breakdown)
if [[ $small == 1 ]]; then SWEEP_CONTEXT=800 LONG_CONTEXT=1100 RUNS=1 fixed+=(--context 512); fi
began=$SECONDS

stem=$("$PYTHON" tests/gpu/times.py --stem) || exit 1
if [[ $small == 1 && $(realpath -m "$folder")/ == "$PWD/tests/gpu_results/"* ]]; then
  echo "a rehearsal measures nothing, and does not write to $folder: name another folder"
  exit 2
fi
mkdir -p "$folder"
rm -f "$folder/$stem"-*.json "$folder/$stem"-parts.tsv # of a run before
# compiled code is shared by all parts, and gone afterwards
cache=$(mktemp -d)
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache}
running="" child=""
interrupted() { # what runs in the background does not hear Ctrl-C
  if [[ -n $running ]]; then
    kill "$child" 2>/dev/null
    note "$running" 130 0 0 "$stem-$running.txt"
  fi
  exit 130
}
finish() {
  rm -rf "$cache"
  "$PYTHON" tests/gpu/merge.py "$folder" "$stem" "$((SECONDS - began))"
}
trap finish EXIT
trap interrupted INT TERM
failed=()

note() { # name, exit code or a word, seconds, seconds at most, log
  printf '%s\t%s\t%s\t%s\t%s\n' "$@" >>"$folder/$stem-parts.tsv"
}

part() { # name, seconds, command …: its output to a log and its end to the screen
  local name=$1 seconds=$2 log="$folder/$stem-$1.txt" start=$SECONDS code
  local left=$((ALL_SECONDS - (SECONDS - began)))
  shift 2
  ((seconds > left)) && seconds=$left
  if ((seconds < LEAST_SECONDS)); then
    echo "── $name: no time left"
    note "$name" "no time left" 0 "$seconds" ""
    failed+=("$name")
    return
  fi
  echo "── $name"
  timeout --kill-after=10 "$seconds" "$@" >"$log" 2>&1 &
  running=$name child=$!
  wait "$child" # in the foreground bash would hear Ctrl-C behind it only
  code=$?
  running=""
  tail -n "${SHOWN:-25}" "$log" | cut -c -300
  [[ $code == 124 || $code == 137 ]] && echo "$name: stopped after $seconds s" | tee -a "$log"
  echo "$name: exit code $code, $((SECONDS - start)) s, $log"
  note "$name" "$code" "$((SECONDS - start))" "$seconds" "${log##*/}"
  ((code == 0 || code == ${ALLOWED:-0})) || failed+=("$name")
}

bench() { # name, seconds, arguments …; 11: it does not fit this card
  local name=$1 seconds=$2
  shift 2
  SHOWN=60 ALLOWED=11 part "$name" "$seconds" env -u TRITON_INTERPRET \
    "$PYTHON" -m dgemma_local.bench --synthetic 26b --json "$folder/$stem-$name.json" "$@"
}

part suite "$SUITE_SECONDS" "$PYTHON" tests/gpu/run.py
for layout in fp8 nvfp4; do
  bench "$layout-1" "$BENCH_SECONDS" --layout "$layout" "${fixed[@]}" --runs "$RUNS"
  bench "$layout-2" "$AGAIN_SECONDS" --layout "$layout" "${fixed[@]}" --runs "$RUNS"
done
# everything but the experts in FP8: less to read, and products at twice the rate
DGEMMA_OPS=fp8-soft bench nvfp4-light "$AGAIN_SECONDS" --layout nvfp4 "${fixed[@]}" --runs "$RUNS" \
  --fp8-attention --fp8-mlp --fp8-embedding
bench context-32k "$SWEEP_SECONDS" --layout nvfp4 --protocol context --context "$SWEEP_CONTEXT" --runs 1
bench context-256k "$LONG_SWEEP_SECONDS" --layout nvfp4 --protocol context --context "$LONG_CONTEXT" --runs 1
SHOWN=120 part times "$TIMES_SECONDS" "$PYTHON" tests/gpu/times.py --out "$folder/$stem-times.json"

# The sanitizer sees single allocations, not torch's pool: a kernel that leaves its tensor leaves an allocation.
left=$((ALL_SECONDS - (SECONDS - began)))
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
log="$stem-sanitizer.txt"
if [[ $small == 1 ]]; then
  SHOWN=3 part launches "$SANITIZER_SECONDS" "$PYTHON" tests/gpu/run.py --launch --seconds=$((SANITIZER_SECONDS / 2))
elif ((left < 45)); then
  echo "── sanitizer: not run, $left s are left"
  note sanitizer "not run: $left s were left" 0 0 ""
elif [[ -z $sanitizer ]]; then
  echo "── sanitizer: not run, there is no compute-sanitizer on this machine"
  note sanitizer "not run: there is no compute-sanitizer" 0 0 ""
elif ! timeout 20 "$sanitizer" --error-exitcode 9 "$PYTHON" -c "import torch; torch.zeros(1).cuda()" \
  >"$folder/$log" 2>&1; then
  echo "── sanitizer: not run, compute-sanitizer does not start on this machine:"
  tail -n 5 "$folder/$log"
  note sanitizer "not run: it does not start" 0 0 "$log"
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
