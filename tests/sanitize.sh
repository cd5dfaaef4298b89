#!/usr/bin/env bash
# compute-sanitizer over small problems of the CUDA programs: accesses out of bounds (memcheck), hazards in shared
# memory (racecheck), barriers that not all threads reach (synccheck).
#   tests/sanitize.sh TOOL[,TOOL...] PROGRAM...        e.g. tests/sanitize.sh memcheck,racecheck transfer_walk chunk_scan
# A problem is a GPU test, so its results are checked too. Every tensor is an allocation of its own: an access past its
# end is seen. Prints the tools' findings and a table last; $OUT/sanitize.txt keeps the table. Exit code 1: something
# was found.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
  sed -n '4p' "$0" | sed 's/^# *//' >&2
  exit 2
fi
IFS=, read -ra tools <<<"$1"
shift
out=${OUT:-$(mktemp -d)}
export CAKE_KDA_JIT_CACHE_DIR=${CAKE_KDA_JIT_CACHE_DIR:-$out/cache} PYTORCH_NO_CUDA_MEMORY_CACHING=1
declare -A problems=(
  [transfer_walk]='test_ragged_chains and (64-1-True or 128-3-False)'
  [segment_summary]='test_every_segment or test_what_is_skipped_is_left_alone'
  [chunk_scan]='test_every_output or test_segments_and_checkpoints'
  [chunk_prepare]='test_tiles_of_every_chunk or test_every_input_form'
  [pack_tables]='test_small_packs'
  [conv]='test_short_documents_at_every_place_of_a_tile or test_absent_inputs'
)
declare -a table
status=0
for program in "$@"; do
  for tool in "${tools[@]}"; do
    began=$SECONDS
    log=$out/$tool.$program.log
    compute-sanitizer --tool "$tool" --kernel-name "kns=$program" --error-exitcode 9 --print-limit 5 \
      python3 -m pytest -q -p no:cacheprovider "tests/gpu/test_${program}_gpu.py" -k "${problems[$program]}" >"$log" 2>&1
    code=$?
    [ $code -eq 0 ] || { status=1 && grep -v '^  *Host Frame' "$log" | tail -60; }
    found=$(grep -E 'SUMMARY' "$log" | tail -1 | sed 's/^=* *//')
    tests=$(grep -E '[0-9]+ (passed|failed|error)' "$log" | tail -1)
    table+=("$(printf '%-16s %-10s %-60s %s; %d s' "$program" "$tool" "$found" "$tests" $((SECONDS - began)))")
  done
done
printf '%s\n' "${table[@]}" | tee "$out/sanitize.txt"
exit $status
