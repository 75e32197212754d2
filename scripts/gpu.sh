#!/bin/sh
# Everything that needs a Hopper GPU, in one go: correctness first, several processes at once, then times, one at a time.
#   sh scripts/gpu.sh OUT [PEERS...]       logs and results go to the folder OUT; ten minutes or so
# From the root of a clone, with jax and torch for CUDA and pytest; peers that are importable are timed too.
set -u
OUT=$1
shift
PEERS=${*:-mslk fa3 flashinfer cudnn}
mkdir -p "$OUT"
export PYTHONPATH=".:tests${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_PREALLOCATE=false
PYTEST="python3 -m pytest -q -m gpu -p no:cacheprovider"

log() { # log NAME SECONDS COMMAND...: in the background, its last lines shown by `shown`
    name=$1 limit=$2
    shift 2
    (timeout "$limit" "$@" >"$OUT/$name.log" 2>&1; echo "exit status $?" >>"$OUT/$name.log") &
}
shown() { for name in "$@"; do echo "== $name"; tail -n 6 "$OUT/$name.log"; done; }

log fuzz 180 python3 -m benchmarks fuzz
log launch 180 $PYTEST tests/bridge/test_launch.py tests/bridge/test_merge_launch.py
log stress 180 $PYTEST tests/bridge/test_lean_cuda.py
log library 180 $PYTEST tests/bridge/test_library.py tests/bridge/test_library_flops.py tests/bridge/test_activation.py
log compile 180 $PYTEST tests/bridge/test_compile.py
log fmha 180 $PYTEST tests/bridge/test_fmha_gpu.py -k "launch_the_kernels or captured or nan_in or numpy or empty"
wait
shown fuzz launch stress library compile fmha
timeout 60 python3 -m bridge.doctor --host-time
for command in decode ragged multiquery paged merge; do
    timeout 200 python3 -m benchmarks "$command" --in-process --jobs 6 --timeout 120 --peers $PEERS --json "$OUT"
done
