#!/usr/bin/env bash
# README and docs as a site, out/docs/index.html, with mkdocs in the environment of tools/test.sh. A link that leads
# nowhere is an error, and so is a page that tools/docs/mkdocs.yml does not list.
set -eu
unset CDPATH PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE
cd "$(dirname "$0")/.."
. tools/python.sh

# The pages and what they link to, without the environments and runs beside them, which mkdocs would go through.
rm -rf build/docs
mkdir -p build/docs
cp README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff build/docs
cp -R docs examples build/docs
for page in cuda/README.md data/README.md tools/docs/site.css; do
    mkdir -p "build/docs/$(dirname "$page")"
    cp "$page" "build/docs/$page"
done
PIP_COMPILE=no PYTHONUTF8=1 "$python" tools/environment.py .test-venv --extra docs
exec .test-venv/bin/python -m mkdocs build --strict --config-file tools/docs/mkdocs.yml
