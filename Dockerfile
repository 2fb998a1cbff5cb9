# The server as an image; one file for every device.
#
#   tools/image.sh                     CPU; tools/image_test.sh builds it, runs it and generates
#   tools/image.sh --device cuda       NVIDIA GPUs: base and packages are chosen here, but this image was never built or run by us
#   tools/image.sh --device ascend     Ascend NPUs: the same
#
#   docker run -p 8080:80 -v $PWD/my-model:/data/model:ro IMAGE --model-id /data/model
#
# It runs as any user, also one without an entry in /etc/passwd, and with a read-only root file system if /tmp is writable
# (docker run --user 12345:0 --read-only --tmpfs /tmp …). docs/operations.md has the rest: ports, signals, health checks.

ARG DEVICE=cpu

# ---- what a device needs beside Python -----------------------------------------------------------------------------------------------
FROM docker.io/library/debian:bookworm-slim AS base-cpu

# PyTorch's packages bring CUDA's libraries, the driver comes from the NVIDIA container toolkit. Triton compiles small launchers while
# the server runs, so this one image keeps a C compiler.
FROM docker.io/library/debian:bookworm-slim AS base-cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

# CANN is not on PyPI; its images bring it with Python 3.11.
FROM quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11 AS base-ascend

# ---- Python 3.11, the same in both stages --------------------------------------------------------------------------------------------
FROM base-${DEVICE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && (command -v python3.11 || apt-get install -y --no-install-recommends python3.11) \
    && rm -rf /var/lib/apt/lists/*

# ---- the build: a compiler, the packages, the native kernels -------------------------------------------------------------------------
FROM python AS build
ARG DEVICE
# A further index for pip. PyPI's own torch is built for CUDA and several GB larger; PyTorch's index of CPU packages makes the image small.
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && (python3.11 -c "import ensurepip" || apt-get install -y --no-install-recommends python3.11-venv) \
    && python3.11 -m venv /opt/forerun
WORKDIR /src
ENV PATH=/opt/forerun/bin:$PATH

# The packages first: they change seldom, so their layer is kept when only the sources change.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print('\n'.join(project['dependencies'] + project['optional-dependencies']['${DEVICE}'] + project['optional-dependencies']['otlp']))" > requirements.txt \
    && if [ "$DEVICE" = cpu ] && [ -n "$TORCH_INDEX" ]; then index="--extra-index-url $TORCH_INDEX"; fi \
    && pip install -c constraints.txt -r requirements.txt ${index:-}

COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels . \
    && pip install --no-deps /wheels/*.whl \
    && cd / && python -m forerun.kernels.cpu.build && python -m forerun.kernels.lookup.build

# ---- the image: no compiler, no sources ----------------------------------------------------------------------------------------------
FROM python AS run
COPY --from=build /opt/forerun /opt/forerun

# TGI's conventions: port 80, the hub cache in /data. HOME and USER serve libraries that ask who they run as: an arbitrary user id has
# no entry in /etc/passwd. Everything that is ever written goes to /tmp.
ENV PATH=/opt/forerun/bin:$PATH \
    PORT=80 \
    HUGGINGFACE_HUB_CACHE=/data \
    HF_HOME=/data \
    HF_MODULES_CACHE=/tmp/hf_modules \
    HOME=/tmp \
    USER=forerun \
    PYTHONUNBUFFERED=1
RUN mkdir -m 1777 /data
WORKDIR /tmp
USER 1000:1000
EXPOSE 80
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s \
    CMD ["python", "-c", "import os, urllib.request as web; web.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/health', timeout=5)"]

# Exec form: the launcher is PID 1 itself and gets SIGTERM.
ENTRYPOINT ["text-generation-launcher"]
