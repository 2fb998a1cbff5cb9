#!/usr/bin/env bash
# Prints the first of docker, podman and buildah that works here.
set -euo pipefail
if docker info >/dev/null 2>&1; then
    echo docker
elif command -v podman >/dev/null; then
    echo podman
elif command -v buildah >/dev/null; then
    echo buildah
else
    echo "building an image needs docker (with its daemon running), podman or buildah: install one of them" >&2
    exit 1
fi
