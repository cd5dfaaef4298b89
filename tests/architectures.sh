#!/bin/sh
# Build every shipped record for every CUDA target; print a table of resources, and every atomic instruction with its
# reason. Run by hand before a release: it takes minutes, needs no GPU, and installs its own nvcc and disassembler, so no
# CUDA toolkit is needed either.
#
#   sh tests/architectures.sh OUT_DIR [TARGET...]
#
# OUT_DIR gets the compiler, the cache and the prebuilt directories. Exit code 1 if a record fails for a target or an
# atomic has no reason, and 2 for wrong use. PYTHON names the interpreter, JOBS the compilations at a time.
set -eu
if [ $# -lt 1 ]; then
  sed -n '6p' "$0" | sed 's/^# *//' >&2
  exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- sm_80 sm_90a sm_100a sm_103a sm_107a sm_120a
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export CAKE_KDA_JIT_TOOLCHAIN_DIR="$out/toolchains" CAKE_KDA_JIT_CACHE_DIR="$out/cache" CAKE_KDA_JIT_VERBOSE=0
unset CAKE_KDA_JIT_NVCC CAKE_KDA_JIT_PREBUILT CAKE_KDA_JIT_DISABLE CUDA_HOME || true

"$python" -m cake_kda_jit toolchain install
"$python" -m cake_kda_jit toolchain list
status=0
"$python" -m cake_kda_jit prebuild --manifest build.json --arch "$@" --out "$out/prebuilt" --keep-going \
  ${JOBS:+--jobs "$JOBS"} || status=1
"$python" -m cake_kda_jit report --dir "$out/prebuilt"
"$python" -m tests.atomics "$out/prebuilt" || status=1
echo
echo "target  kernels built"
for target in "$@"; do
  printf '%-8s%s\n' "$target" "$(find "$out/prebuilt/v1/$target" -name '*.so' 2>/dev/null | wc -l)"
done
exit $status
