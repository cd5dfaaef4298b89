#!/usr/bin/env bash
# GPU tests and measurements on a machine with a CUDA device; takes nothing from a network.
#   tests/device.sh tests/gpu/test_transfer_walk_gpu.py bench:walk ...
# A pytest path runs as such; bench:NAME[:option,option] runs a measurement and keeps its JSON (the walk's picture too)
#   in $OUT.
# A prebuilt directory in $CAKE_KDA_JIT_PREBUILT is used as it is; what is missing is compiled by the machine's nvcc.
# Prints a short table last.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-$(mktemp -d)}
export CAKE_KDA_JIT_CACHE_DIR=${CAKE_KDA_JIT_CACHE_DIR:-$out/cache} PYTHONUNBUFFERED=1
declare -a table
status=0
for what in "$@"; do
  began=$SECONDS
  case $what in
    bench:*)
      IFS=: read -r _ name options <<<"$what"
      # shellcheck disable=SC2086 — options are words, separated by commas
      [ "$name" = walk ] && options="--png,$out/walk.png,$options"
      python3 -m cake_kda_jit.bench "$name" --json "$out/$name.json" ${options//,/ } ;;
    *) python3 -m pytest -q -x "$what" ;;
  esac
  code=$?
  [ $code -eq 0 ] || status=1
  table+=("$(printf '%-50s exit %d  %4d s' "$what" $code $((SECONDS - began)))")
done
printf '\n%s\n' "${table[@]}"
exit $status
