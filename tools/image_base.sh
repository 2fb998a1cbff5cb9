#!/usr/bin/env bash
# Makes the base image docker.io/library/debian:bookworm-slim from Debian's packages, for buildah on a machine that reaches a Debian
# mirror but no image registry. Needs root, buildah and debootstrap. An image of that name that is already there is kept.
#
#   tools/image_base.sh [MIRROR]        without one: the mirror that this machine's apt uses
set -euo pipefail

image=docker.io/library/debian:bookworm-slim
mirror=${1:-$(sed -nE 's/^(URIs:|deb) *(\[[^]]*\] *)?(https?:[^ ]+).*/\3/p' /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -1)}
if buildah inspect --type image "$image" >/dev/null 2>&1; then
    echo "$image is there"
    exit 0
fi
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$mirror"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah add --quiet "$container" "$root" /
buildah config --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit --quiet --rm "$container" "$image"
echo "made $image"
