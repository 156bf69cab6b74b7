#!/usr/bin/env bash
# Make .venv from a file of pins: requirements/install.sh requirements/cpu.txt
#
# --no-deps, because the pins are complete and pip has no way to leave out torchvision, torchaudio and torchcodec, whose CUDA builds
# break vLLM beside a CPU torch. The CPU build of torch comes from PyTorch's own index where the configured one has none.
set -euo pipefail
cd "$(dirname "$0")/.."
pins=$1
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "setup: Python 3.11 is needed (set PYTHON=/path/to/python3.11); found $("$python" --version)" >&2; exit 1; }
echo "setup: making .venv from $pins (about 2 minutes)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
rm -f .venv/ready
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps)
torch=$(grep -E '^torch==' "$pins")
if ! "${pip[@]}" "$torch" 2>.venv/pip-torch.log; then
  case $torch in
    *+cpu) echo "setup: $torch is not in the configured index; taking it from PyTorch's CPU index"
           "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "$torch" ;;
    *) cat .venv/pip-torch.log >&2; exit 1 ;;
  esac
fi
"${pip[@]}" -r <(grep -vE '^torch==' "$pins")
"${pip[@]}" --no-build-isolation -e .
touch .venv/ready
echo "setup: done"
