#!/bin/sh
# Registers, spills, stack and instructions of programs' CUDA kernels, for every target that the nvcc found here knows.
# Run by hand after a kernel changed; it needs no GPU.
#
#   sh tests/resources.sh PROGRAM...        writes docs/measurements/resources/PROGRAM.json and prints a table
#
# PYTHON names the interpreter, TARGETS the targets. Shipped and test-only records are built; exit code 1 if one fails.
set -eu
if [ $# -lt 1 ]; then
  sed -n '5p' "$0" | sed 's/^# *//' >&2
  exit 2
fi
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
targets=${TARGETS:-sm_80 sm_86 sm_89 sm_90a sm_100a sm_103a sm_120a}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for program in "$@"; do
  for manifest in build.json build.test.json; do
    count=$("$python" - "$manifest" "$program" "$out/$manifest" <<'P'
import json, sys
source, program, target = sys.argv[1:]
manifest = json.load(open(source))
manifest["records"] = [r for r in manifest["records"] if r["program"] == program and r["family"] != "cpu"]
json.dump(manifest, open(target, "w"))
print(len(manifest["records"]))
P
    )
    [ "$count" -gt 0 ] || continue
    # shellcheck disable=SC2086 — targets are words
    "$python" -m cake_kda_jit prebuild --manifest "$out/$manifest" --arch $targets --out "$out/$program"
  done
  "$python" -m cake_kda_jit report --dir "$out/$program" --json >"docs/measurements/resources/$program.json"
  "$python" -m cake_kda_jit report --dir "$out/$program"
done
