#!/usr/bin/env bash
# compute-sanitizer over a small problem of every CUDA kernel: accesses out of bounds (memcheck), hazards in shared
# memory (racecheck), barriers that not all threads reach (synccheck).
#   tests/sanitize.sh TOOL[,TOOL...] [EXPRESSION]     e.g. tests/sanitize.sh memcheck,racecheck 'test_a_step and 128'
# The problems are tests/gpu/test_small_problems_gpu.py, or those of them that pytest's -k takes for EXPRESSION; their
# results are checked too. Every tensor is an allocation of its own: an access past its end is seen. Prints the tools'
# findings, what races in which kernel and a table last; $OUT keeps the logs and sanitize.txt, the table. Exit code 1:
# something was found.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
  sed -n '4p' "$0" | sed 's/^# *//' >&2
  exit 2
fi
IFS=, read -ra tools <<<"$1"
out=${OUT:-$(mktemp -d)}

# A line for each kernel and kind of race: how many reports, of how many pairs of places in its code, the first pair.
count_races() {
  sed -nE -e 's/<unnamed>:://g; s/\(Args[^+]*//; s/\((int|bool)\)//g' \
    -e 's/.*Race reported between ([A-Z][a-z]+) access at (void )?(.*)\+(0x[0-9a-f]+).*/report \1 \4 \3/p' \
    -e 's/^=+ +and ([A-Z][a-z]+) access at .*\+(0x[0-9a-f]+).*/with \1 \2/p' "$1" |
    awk '
      $1 == "report" { report++; kind = $2; place = $3; kernel = $4 $5 $6; next }
      {
        race = sprintf("%-36s %s and %s", kernel, kind, $2)
        reports[race] += !counted[race, report]++
        pairs[race] += !counted[race, place, $3]++
        if (!(race in first)) first[race] = place " and " $3
      }
      END {
        for (race in reports) printf "%s: reports %d, pairs %d, %s\n", race, reports[race], pairs[race], first[race]
      }' |
    sort
}

export CAKE_KDA_JIT_CACHE_DIR=${CAKE_KDA_JIT_CACHE_DIR:-$out/cache} PYTORCH_NO_CUDA_MEMORY_CACHING=1
declare -a table
status=0
for tool in "${tools[@]}"; do
  began=$SECONDS
  log=$out/$tool.log
  # Kernels that are not ours take most of the time if they are looked at.
  compute-sanitizer --tool "$tool" --kernel-name kns=__kernel --kernel-name kns=__sum --error-exitcode 9 \
    --print-limit 0 python3 -m pytest -v -p no:cacheprovider --durations=0 --durations-min=0.1 \
    tests/gpu/test_small_problems_gpu.py ${2:+-k "$2"} >"$log" 2>&1
  code=$?
  [ $code -eq 0 ] || { status=1 && grep -v '^  *Host Frame' "$log" | tail -100; }
  count_races "$log"
  found=$(grep -E 'SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
  tests=$(grep -oE '[0-9]+ (passed|failed|error).* in [0-9.]+s' "$log" | tail -1)
  table+=("$(printf '%-10s %-60s %s; %d s' "$tool" "$found" "$tests" $((SECONDS - began)))")
done
printf '%s\n' "${table[@]}" | tee "$out/sanitize.txt"
exit $status
