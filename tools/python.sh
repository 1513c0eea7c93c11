# Sourced by the scripts beside it: sets `python` to a Python that llmq runs on.
python=
for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] ||
    { echo "llmq needs Python 3.10 or newer, and there is none on the PATH: install one, or set PYTHON to it" >&2; exit 2; }
