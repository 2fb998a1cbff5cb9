#!/usr/bin/env bash
# Builds the container image with docker, podman or buildah, whichever there is.
#
#   tools/image.sh [--device cpu|cuda|ascend] [--tag NAME] [--tool docker|podman|buildah] [-- OPTIONS OF THE BUILD TOOL]
#
# Behind a proxy or a package mirror, hand the build what it needs after the two dashes, for instance
#   tools/image.sh -- --build-arg TORCH_INDEX=URL -v "$HOME/.config/pip/pip.conf:/etc/pip.conf:ro"
# In a sandbox without user namespaces or overlay file systems buildah wants BUILDAH_ISOLATION=chroot and STORAGE_DRIVER=vfs.
set -euo pipefail
cd "$(dirname "$0")/.."

device=cpu tag='' tool=''
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --tag) tag=$2; shift 2 ;;
        --tool) tool=$2; shift 2 ;;
        --) shift; break ;;
        *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
case $device in
    cpu | cuda | ascend) ;;
    *) echo "no such device: $device (cpu, cuda or ascend)" >&2; exit 2 ;;
esac
tag=${tag:-forerun:$device}
tool=${tool:-$(tools/image_tool.sh)}

# Always given, although it has a default: buildah before 1.33 does not follow a default into `FROM base-${DEVICE}`.
arguments=(--build-arg "DEVICE=$device" --tag "$tag" --file Dockerfile "$@" .)
case $tool in
    docker) docker build "${arguments[@]}" ;;
    # Docker's own format: the other one has no HEALTHCHECK.
    podman | buildah) "$tool" build --format docker "${arguments[@]}" ;;
    *) echo "no such tool: $tool (docker, podman or buildah)" >&2; exit 2 ;;
esac
echo "built $tag with $tool"
