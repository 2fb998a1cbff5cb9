#!/usr/bin/env bash
# Builds the image, runs it as users do in hardened clusters, generates over HTTP and stops it:
#
#   user 4321 without an entry in /etc/passwd · read-only root, /tmp in memory · the model mounted read-only · port 80 · SIGTERM to PID 1
#
#   tools/image_test.sh [--no-build] [--tool docker|podman|buildah] [-- OPTIONS OF THE BUILD TOOL]
#
# With docker or podman the container is theirs. buildah runs none, so the same conditions are made with namespaces (needs root).
# MODEL names the model folder (default: the demo model, see `make model`).
set -euo pipefail
cd "$(dirname "$0")/.."

tag=forerun:image-test model=$(realpath "${MODEL:-models/smollm2-135m-instruct}") build=yes tool=''
while [ $# -gt 0 ]; do
    case $1 in
        --no-build) build=no; shift ;;
        --tool) tool=$2; shift 2 ;;
        --) shift; break ;;
        *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
tool=${tool:-$(tools/image_tool.sh)}
test -f "$model/config.json" || { echo "no model in $model: run 'make model' first, or set MODEL" >&2; exit 2; }
if [ $build = yes ]; then
    tools/image.sh --tag "$tag" --tool "$tool" -- "$@"
fi

log=$(mktemp)
finish() { :; }
trap 'finish; rm -f "$log"' EXIT
fail() {
    echo "FAILED: $*" >&2
    tail -n 40 "$log" >&2
    exit 1
}

# Each tool says how to: `start` a container, run a command `inside` it, read a list from the image's configuration (`of_image`), and
# `stop` it by SIGTERM to PID 1, which leaves the exit code in $code.
case $tool in
    docker | podman)
        start() {
            name=forerun-image-test-$$
            finish() { "$tool" rm --force "$name" >/dev/null 2>&1 || true; }
            "$tool" run --detach --name "$name" --user 4321:4321 --read-only --tmpfs /tmp \
                --volume "$model:/data:ro" --env MODEL_ID=/data "$tag" >/dev/null
        }
        inside() { "$tool" exec "$name" "$@"; }
        of_image() { "$tool" inspect --type image "$tag" | python3 -c "$READ" "$1"; }
        alive() { "$tool" logs "$name" >"$log" 2>&1; [ "$("$tool" inspect --format '{{.State.Running}}' "$name")" = true ]; }
        stop() { "$tool" kill --signal TERM "$name" >/dev/null; code=$("$tool" wait "$name"); }
        ;;
    buildah)
        start() {
            container=$(buildah from --pull-never "$tag")
            finish() { kill -KILL "${box:-}" 2>/dev/null || true; buildah rm "$container" >/dev/null; }
            root=$(buildah mount "$container")
            mapfile -t environment < <(of_image Env)
            mapfile -t entrypoint < <(of_image Entrypoint)
            unshare --mount --net --pid --fork --kill-child bash -euc "$BOX" box "$root" "$model" \
                env -i "${environment[@]}" MODEL_ID=/data "${entrypoint[@]}" >"$log" 2>&1 &
            box=$!
            for _ in $(seq 50); do
                one=$(pgrep -P "$box") && break
                sleep 0.1
            done
        }
        of_image() { buildah inspect --type image "$tag" | python3 -c "$READ" "$1"; }
        inside() {
            nsenter --target "$one" --mount --net --pid --root --wd --setuid 4321 --setgid 4321 -- env -i "${environment[@]}" "$@"
        }
        alive() { kill -0 "$box" 2>/dev/null; }
        stop() { kill -TERM "$one"; code=0; wait "$box" || code=$?; }
        ;;
esac

# What a container is, in one process: its own mounts, network and process ids. `exec` keeps it PID 1. Docker opens the low ports of a
# container's network to everybody; so does this.
BOX='
root=$1 model=$2; shift 2
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
mount -t tmpfs tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount --bind "$model" "$root/data"
mount -o remount,ro,bind "$root/data"
ip link set lo up
echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start
cd /
exec chroot --userspec=4321:4321 --groups=4321 "$root" "$@"
'

READ='
import json, sys
about = json.load(sys.stdin)
value = (about[0]["Config"] if isinstance(about, list) else about["Docker"]["config"])[sys.argv[1]]
print("\n".join(value if isinstance(value, list) else value["Test"][1:]))
'
GENERATE='
import json, urllib.request as web
body = json.dumps({"inputs": "The capital of France is", "parameters": {"max_new_tokens": 12, "details": True}}).encode()
request = web.Request("http://127.0.0.1:80/generate", body, {"content-type": "application/json"})
answer = json.load(web.urlopen(request, timeout=60))
print("generated:", repr(answer["generated_text"]))
assert answer["details"]["generated_tokens"] > 0 and answer["generated_text"].strip()
'
TRACES='
from forerun.server import otlp
for address in ("http://collector:4317", "http://collector:4318/v1/traces"):
    otlp.exporter(address).shutdown()
'

mapfile -t healthcheck < <(of_image Healthcheck)
start
echo "started $tag with $tool"
for second in $(seq 120); do
    inside "${healthcheck[@]}" 2>/dev/null && break
    alive || fail "the container ended before it was healthy"
    [ "$second" -lt 120 ] || fail "not healthy after 120 seconds"
    sleep 1
done
echo "healthy"
alive && grep -m 1 "forerun.launch: Worker" "$log"
if inside sh -c "command -v cc c++ gcc g++ make"; then fail "there is a compiler in the image"; fi
inside python -c "$GENERATE" || fail "no answer to /generate"
inside python -c "$TRACES" || fail "traces cannot be sent: the packages of the otlp extra are missing"
stop
[ "$code" = 0 ] || fail "exit code $code after SIGTERM to PID 1"
echo "SIGTERM: exit code 0"
echo "PASSED"
