#!/usr/bin/env bash
# Fetches the modules of static/vendor anew, from the package registry that npm is configured for.
set -euo pipefail
cd "$(dirname "$0")/static/vendor"
rm -f ./*.js ./*.css ./*.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { # NAME@VERSION FILE AS
  (cd "$work" && rm -rf package && npm pack --silent "$1" >/dev/null && tar xzf "${1%@*}-${1#*@}.tgz")
  # Browsers resolve no bare names, and maps of sources are not kept.
  sed -E 's#from ?"preact"#from"./preact.js"#g; /^\/\/# sourceMappingURL/d' "$work/package/$2" > "$3.js"
  cp "$work/package/LICENSE" "${1%@*}-${1#*@}-LICENSE.txt"
}
fetch preact@11.2.0 dist/preact.mjs preact
fetch preact@11.2.0 hooks/dist/hooks.mjs hooks
fetch htm@3.1.1 dist/htm.mjs htm
fetch uplot@1.6.32 dist/uPlot.iife.min.js uplot  # its module is not minified
echo "export default uPlot;" >> uplot.js
cp "$work/package/dist/uPlot.min.css" uplot.css
