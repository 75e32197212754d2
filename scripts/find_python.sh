#!/bin/sh
# Prints the path of a Python 3.12 to 3.14 that can make a virtual environment.
# An argument, if not empty, is tried first. Each candidate is run: one on the PATH may be a stub that does not start.
check='import sys, venv, ensurepip
if not (3, 12) <= sys.version_info[:2] <= (3, 14): sys.exit(1)
print(sys.executable)'

if [ -n "${1:-}" ]; then
    "$1" -c "$check" 2>/dev/null && exit 0
    echo "PYTHON=$1 is not a usable Python 3.12 to 3.14; looking for another." >&2
fi
for python in python3.12 python3.13 python3.14 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[234]*/bin/python; do
    "$python" -c "$check" 2>/dev/null && exit 0
done
echo "No Python 3.12 to 3.14 with venv found. Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
