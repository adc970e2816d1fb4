#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image: Python 3.11 or later, and the packages.
set -euo pipefail
source="${AUTOGRADER_ROOT:-/autograder}/source"
python=""
for candidate in python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null &&
        "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    apt-get update -q
    apt-get install -y -q python3.11 python3.11-venv
    python=python3.11
fi
"$python" -m venv "$source/.venv" || {
    apt-get update -q && apt-get install -y -q "$python-venv" && "$python" -m venv "$source/.venv"
}
"$source/.venv/bin/pip" install --disable-pip-version-check -r "$source/requirements.txt"
