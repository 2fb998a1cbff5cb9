#!/usr/bin/env bash
# Install the pinned clients of Node beside this file. Never fails: where it cannot, their tests are skipped, and build/node-clients.txt
# says why.
cd "$(dirname "$0")" || exit 0
why=../../../build/node-clients.txt
[[ node_modules/.package-lock.json -nt package-lock.json ]] && exit 0
mkdir -p ../../../build
missing() {
    rm -rf node_modules
    echo "the clients of Node are not installed: $1" | tee "$why"
    exit 0
}
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then missing "there is no node or no npm here"; fi
said=$(timeout 180 npm ci --no-audit --no-fund --ignore-scripts --fetch-retries 1 --fetch-timeout 30000 2>&1) ||
    missing "npm ci failed: $(head -n 1 <<<"${said:-it took longer than 3 minutes}")"
touch node_modules/.package-lock.json
rm -f "$why"
