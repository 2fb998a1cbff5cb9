"""What this machine offers, whether the model is whole, and what would be chosen. Changes nothing; works without a tensor library.

The device itself is asked in a process of its own (`python -m forerun.doctor`, below), which may fail without taking the rest with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from forerun import __version__, modelfolder
from forerun.backends.cpu.memory import Limits
from forerun.config import Config
from forerun.hub import ModelNotFound, locate, must_fetch

PROBE_SECONDS = 120
INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile",
    "amx_int8", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
DEVICE_FILES = {"NVIDIA": ("nvidia[0-9]*", "nvidiactl"), "Ascend": ("davinci[0-9]*", "davinci_manager"), "AMD": ("kfd",)}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`state`: a fault keeps the server from running, a warning does not."""

    state: Literal["ok", "warning", "fault"]
    topic: str
    text: str

    def line(self) -> str:
        return f"{self.state:<8} {self.topic:<13} {self.text}"


def run(config: Config) -> int:
    """Print the findings; the exit code of `forerun doctor`."""
    findings = examine(config)
    for finding in findings:
        print(json.dumps(dataclasses.asdict(finding)) if config.logging.json_output else finding.line())
    return 1 if any(finding.state == "fault" for finding in findings) else 0


def examine(config: Config, root: Path = Path("/")) -> list[Finding]:
    limits = Limits(root)
    findings = [
        Finding("ok", "version", f"forerun {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"),
        cores(limits),
        memory(limits),
        instructions(root),
        devices(root),
        channels(),
        files(config),
        *[Finding("warning", "option", note) for note in config.notes],
    ]
    available, _ = limits.memory()
    if config.model.model_id:
        findings += model(config, available)
    return findings + choice(config)


def cores(limits: Limits) -> Finding:
    allowed, usable, there = len(os.sched_getaffinity(0)), limits.cores(), os.cpu_count() or 1
    cuts = [f"affinity allows {allowed}"] if allowed < there else []
    cuts += [f"the cgroup's quota allows {usable}"] if usable < allowed else []
    text = f"{usable} of {there}" + (f" ({', '.join(cuts)})" if cuts else "")
    if usable == 1:
        return Finding("warning", "cores", f"{text}: front and worker will share one; two or more are better")
    return Finding("ok", "cores", text)


def memory(limits: Limits) -> Finding:
    free, total = limits.memory()
    return Finding("ok", "memory", f"{_size(free)} available of {_size(total)}, cgroup limits included")


def instructions(root: Path) -> Finding:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set())
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = [name for name in INSTRUCTIONS if name in flags]
    text = f"{names[0] if names else platform.machine()}: {' '.join(found) or 'none of those that matter here'}"
    if "x86" in platform.machine() and "avx2" not in flags:
        return Finding("warning", "instructions", f"{text}; without AVX2 expect it to be slow")
    return Finding("ok", "instructions", text)


def devices(root: Path) -> Finding:
    """By their device files; whether they can be used is asked in `choice`."""
    found = []
    for maker, patterns in DEVICE_FILES.items():
        files = sorted(path.name for pattern in patterns for path in (root / "dev").glob(pattern))
        found += [f"{maker}: {' '.join(files)}"] if files else []
    return Finding("ok", "devices", "; ".join(found) or "no accelerator files in /dev; the CPU")


def channels() -> Finding:
    """What the front and its workers talk through: anonymous shared memory (nothing in /dev/shm), event counters, process handles."""
    try:
        os.close(os.memfd_create("forerun-doctor"))
        os.close(os.eventfd(0))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as wrong:
        return Finding(
            "fault", "channels", f"memfd, eventfd or pidfd is not available ({wrong}): Linux 5.3 or later without a seccomp ban is needed"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Finding("warning", "channels", f"only {soft} open files are allowed; each client takes one. Raise it with `ulimit -n 4096`")
    return Finding("ok", "channels", f"memfd, eventfd and pidfd work; {soft} open files are allowed")


def files(config: Config) -> Finding:
    cache = Path(config.model.huggingface_hub_cache)
    state = "writable" if os.access(cache, os.W_OK) else "read-only" if cache.is_dir() else "does not exist"
    return Finding("ok", "hub cache", f"{cache} ({state})")


def model(config: Config, available: int) -> list[Finding]:
    asked = config.model.model_id, config.model.revision, config.model.huggingface_hub_cache
    if must_fetch(*asked) and not config.model.hf_hub_offline:
        return [Finding("warning", "model", f"{asked[0]} is not here: the server will fetch it from the hub when it starts")]
    try:
        path = locate(*asked)
    except ModelNotFound as missing:
        return [Finding("fault", "model", str(missing))]
    folder = modelfolder.inspect(path, config.model.allow_pickle)
    findings = [Finding("fault", "model", fault) for fault in folder.faults]
    context = f", context {folder.context_tokens} tokens" if folder.context_tokens else ""
    text = f"{path}: {folder.architecture}, {folder.weights} ({_size(folder.weight_bytes)}){context}"
    findings.append(Finding("ok", "model", text + (", has a chat template" if folder.chat_template else "")))
    if folder.weight_bytes > available * config.device.cuda_memory_fraction:
        findings.append(
            Finding("warning", "model", f"its weights take {_size(folder.weight_bytes)} on disk, more than the memory that is free")
        )
    wanted = config.limits.max_total_tokens
    if wanted and folder.context_tokens and wanted > folder.context_tokens:
        findings.append(
            Finding("warning", "model", f"--max-total-tokens {wanted} is more than its context of {folder.context_tokens} tokens")
        )
    return findings


def choice(config: Config) -> list[Finding]:
    """What the worker's process would open. The probe's last line of output is its answer."""
    asked = config.device
    command = [sys.executable, "-m", "forerun.doctor", asked.device, str(asked.threads), str(asked.cuda_memory_fraction)]
    try:
        done = subprocess.run(command, env=config.worker_environment(), capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return [
            Finding("fault", "device", f"opening device {asked.device} did not return within {PROBE_SECONDS} s: is it in use or broken?")
        ]
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        cure = ": pip install 'forerun[cpu]'" if "No module named 'torch'" in said else ""
        return [Finding("fault", "device", f"{said}{cure}")]
    told: dict[str, Any] = json.loads(lines[-1])
    return [
        Finding("ok", "would choose", f"device {told['device']}, types {', '.join(told['dtypes'])}, pages of {told['page_tokens']} tokens"),
        Finding("ok", "would choose", ", ".join(f"{name} {value}" for name, value in told["facts"].items())),
        Finding(
            "ok", "would choose", f"speculator {config.speculation.speculator}, port {config.serving.port} on {config.serving.hostname}"
        ),
    ]


def probe(device: str, threads: str, fraction: str) -> str:
    """Opens the device and tells what it is, as JSON."""
    from forerun.backends.registry import open_backend

    backend = open_backend(device, int(threads), float(fraction))
    caps = backend.caps
    types = [str(dtype).removeprefix("torch.") for dtype in caps.dtypes]
    return json.dumps({"device": backend.name, "dtypes": types, "page_tokens": caps.page_tokens, "facts": backend.facts()})


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    print(probe(*sys.argv[1:4]))
