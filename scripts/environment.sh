#!/usr/bin/env bash
# Build the project's environment: scripts/environment.sh DIR [REQUIREMENT | -r FILE ...]
# With uv where it can be had (seconds), else with pip (minutes). PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$1
shift
python=${PYTHON:-python3}

version=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null || true)
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "manymesh needs Python 3.11 or newer; '$python' is ${version:-not there}. Set PYTHON=/path/to/python3.11" >&2
  exit 1
fi

"$python" -m venv --clear "$target"
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
  "$target/bin/python" -m pip install --quiet uv 2>/dev/null && uv=$target/bin/uv || uv=
fi

projects=(-e . -e plugins/fsdp -e plugins/hf_rollout -e plugins/megatron -e plugins/sglang_rollout -e plugins/vllm_rollout)
if [ -n "$uv" ]; then
  # A wheel folder that pip was told of serves uv too. Without one, uv picks torch's build for what the machine has.
  export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
  backend=(--torch-backend "${TORCH_BACKEND:-auto}")
  [ -n "$UV_FIND_LINKS" ] && backend=()
  "$uv" pip install --quiet --python "$target/bin/python" ${backend[@]+"${backend[@]}"} \
    "${projects[@]}" "$@" -r requirements/dev.txt
else
  "$target/bin/python" -m pip install --quiet "${projects[@]}" "$@" -r requirements/dev.txt
fi
# Compiled once here, since many machines forbid it at run time and then every start is two to three times slower.
PYTHONDONTWRITEBYTECODE= "$target/bin/python" -m compileall -q -j 0 "$target/lib" >/dev/null || true
