"""Every option of the server, declared once: TGI's flags and environment variables, and ours. The only place that reads the environment.

Flags win over the environment, the environment over `--config FILE.toml`, the file over the defaults below. `Config.parse` returns frozen
sections in which every contradiction has been refused, and `notes`: one line for each option that was given and does nothing here.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from forerun.options import ConfigError, Option, from_environment, from_file, from_flags, idle, options_of, ours, tgi

SPECULATORS = ("dflash", "dspark", "eagle", "grams", "lookahead", "medusa", "mlp", "model", "mtp", "ngram", "remote", "suffix")
"""drafters this version can run, alone or joined by `+`, each with `=VALUE` where it takes one"""


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    model_id: str = tgi(
        "",
        "a model folder, a GGUF file, or a hub id, which is fetched if the hub cache does not hold it (there is no default)",
        env=("HF_MODEL_ID",),
    )
    revision: str | None = tgi(None, "hub revision: a branch, tag or commit", env=("HF_MODEL_REVISION",))
    dtype: Literal["bfloat16", "float16", "float32"] | None = tgi(
        None, "type of weights and activations; default: the best the device has for the checkpoint"
    )
    quantize: (
        Literal[
            "int8",
            "int4",
            "awq",
            "compressed-tensors",
            "eetq",
            "exl2",
            "gptq",
            "marlin",
            "bitsandbytes",
            "bitsandbytes-nf4",
            "bitsandbytes-fp4",
            "fp8",
        ]
        | None
    ) = tgi(
        None,
        "weights of 8 bits (int8, eetq, bitsandbytes) or 4 (int4, with an 8-bit head), made at load; or as a GPTQ, AWQ or GGUF checkpoint "
        "has them, which needs no flag. The other names are refused, with what to use instead",
        env=("HF_MODEL_QUANTIZE",),
    )
    kv_cache_dtype: Literal["bfloat16", "float32", "int8", "fp8_e4m3fn", "fp8_e5m2"] | None = tgi(
        None,
        "type of the KV cache; default: that of the weights. int8 has a scale for each position and head and holds nearly twice as many "
        "tokens as bfloat16; the fp8 names of TGI are served as int8, which takes as many bytes and is nearer to the numbers",
    )
    trust_remote_code: bool = tgi(
        False, "run Python code that comes with the model (in the worker and the tokenizer converter)", env=("HF_MODEL_TRUST_REMOTE_CODE",)
    )
    allow_pickle: bool = ours(False, "load .bin checkpoints, which can run code when read; prefer safetensors")
    rope_scaling: Literal["linear", "dynamic"] | None = tgi(None, "RoPE scaling; the checkpoint's own when unset")
    rope_factor: float | None = tgi(None, "RoPE scaling factor; alone it means linear", least=1.0)
    tokenizer_name: str | None = tgi(None, "folder or hub id to take the tokenizer from; default: the model's")
    tokenizer_config_path: str | None = tgi(None, "tokenizer_config.json whose chat template takes the place of the model's own")
    lora_adapters: tuple[str, ...] = tgi((), "id[=path][@revision],…; refused: adapters are not served by this version", comma=True)
    huggingface_hub_cache: str = tgi(
        "", "hub cache; default: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub", env=("HF_HUB_CACHE",)
    )
    hf_home: str | None = tgi(None, "folder that holds the hub cache", flag=False)
    hf_hub_offline: bool = tgi(
        False, "never touch the network: a model that the hub cache does not hold is an error", env=("TRANSFORMERS_OFFLINE",)
    )
    hf_token: str | None = tgi(
        None,
        "hub token, for gated and private models",
        flag=False,
        secret=True,
        env=("HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    max_concurrent_requests: int = tgi(128, "requests that may wait or run at once; one more is answered 429", least=1)
    max_best_of: int = tgi(2, "largest `best_of`", least=1)
    max_stop_sequences: int = tgi(4, "most stop strings of a request", least=0)
    max_top_n_tokens: int = tgi(5, "largest `top_n_tokens`", least=0)
    max_input_tokens: int | None = tgi(None, "longest prompt; default: max_total_tokens - 1", least=1, names=("max_input_length",))
    max_total_tokens: int | None = tgi(None, "longest prompt and answer together; default: what model and memory allow", least=2)
    max_client_batch_size: int = tgi(4, "most prompts of one /v1/completions request", least=1)
    payload_limit: int = tgi(2_000_000, "largest request body, bytes", least=1)
    max_prompt_logprobs: int = ours(4096, "longest prompt, in tokens, for which `decoder_input_details` is served", least=0)
    disable_grammar_support: bool = tgi(False, "refuse requests with a grammar")


@dataclasses.dataclass(frozen=True, slots=True)
class Batching:
    max_batch_prefill_tokens: int | None = tgi(None, "most prompt tokens of one step; default: chosen by the worker", least=1)
    max_batch_total_tokens: int | None = tgi(None, "KV positions in all; default: what memory allows", least=1)
    max_batch_size: int | None = tgi(None, "most sequences running at once; 1 or more", least=1)
    max_waiting_tokens: int = tgi(20, "decode steps after which waiting prompts must get a share of a step", least=0)
    waiting_served_ratio: float = tgi(0.3, "waiting/running ratio from which waiting prompts get a share of a step at once", least=0)
    max_inter_token_ms: float | None = ours(
        None,
        "longest pause that another request's prompt may put into a running stream; default: from the measured cost of a step",
        least=1,
    )
    prefix_caching: bool = tgi(True, "reuse the KV of prompts and answers that start alike; never changes an output", flag=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Speculation:
    speculator: str = ours(
        "auto",
        "guesses come from `none`, `ngram`, `suffix`, `model=DIR` or a join (`a+b`); `auto`: what the model brings, else `suffix`",
    )
    speculate: int | None = tgi(None, "most guesses a sequence may have in a step; 0 = off", least=0)
    speculation_max_batch_size: int | None = ours(None, "no guesses while more sequences than this are running", least=0)
    speculation_controller: Literal["price", "aimd", "fixed"] = ours("price", "how the number of guesses follows acceptance and load")
    acceptance: Literal["dice", "rejection"] = ours(
        "dice", "which guesses hold: `dice` never changes an output; `rejection` keeps its distribution only (chains, sampled requests)"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    device: Literal["auto", "cpu", "cuda", "ascend"] = ours("auto", "device of the worker")
    threads: int = ours(
        0,
        "compute threads of the worker; 0 = all cores of affinity and cgroup but one for the front, or fewer that are as fast; both of two",
        least=0,
    )
    cuda_memory_fraction: float = tgi(1.0, "share of the device's memory that may be used (also on the CPU)", most=1.0)
    worker_timeout: float = ours(30.0, "seconds without a heartbeat after which a worker counts as hung and is replaced", least=0.1)


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    hostname: str = tgi("0.0.0.0", "IP address to listen on (a name other than localhost listens on 0.0.0.0, as in TGI)")
    port: int = tgi(3000, "port to listen on; 0 = any free one", short="-p", least=0, most=65535, env=("SAGEMAKER_BIND_TO_PORT",))
    api_key: str | None = tgi(None, "key that inference requests must carry as `Authorization: Bearer KEY`", secret=True, never_empty=True)
    cors_allow_origin: tuple[str, ...] = tgi((), "allowed origin, repeatable; default: any")
    validation_workers: int = tgi(2, "tokenizer threads for long texts", least=1)
    graceful_termination_timeout: int = tgi(90, "seconds that running requests get after SIGTERM", short="-g", least=0)
    ngrok: bool = tgi(False, "refused: there is no ngrok tunnel (TGI's own panics); put a reverse proxy in front")
    compute_type: str | None = tgi(None, "value of the x-compute-type response header; default: the device", flag=False)
    config: str | None = ours(None, "TOML file with any of these options")


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    watermark_gamma: float = tgi(0.5, "share of the vocabulary on the watermark's green list", least=0, most=1)
    watermark_delta: float = tgi(2.0, "what the watermark adds to a green token's logit")


@dataclasses.dataclass(frozen=True, slots=True)
class Logging:
    json_output: bool = tgi(False, "log one JSON object a line", names=("log_json",))
    log_level: str = tgi("info", "trace, debug, info, warn, error or off; of a filter such as `info,tower=warn` the bare level counts")
    log_colorize: bool = tgi(False, "true turns colour OFF (TGI's meaning); default: colour on a terminal", flag=False)
    env: bool = tgi(False, "log what `forerun doctor` would print, then serve", short="-e", no_env=True)
    otlp_endpoint: str | None = tgi(
        None,
        "OpenTelemetry collector that traces of requests are sent to: http://HOST:4317 for gRPC (as TGI), http://HOST:4318/v1/traces for "
        "HTTP with protobuf. Needs the extra `otlp`",
        secret=True,
    )
    otlp_service_name: str = tgi("text-generation-inference.router", "service name in traces")
    hint: bool = ours(False, "print a curl line to paste when the server is ready")


@dataclasses.dataclass(frozen=True, slots=True)
class Testing:
    echo: bool = ours(False, "answer without a model", hidden=True)
    test_faults: bool = ours(False, "accept injected faults", hidden=True)


_ONE_WORKER = "this version runs one worker on one device"
_NO_TUNNEL = "there is no ngrok tunnel (TGI's own panics); put a reverse proxy in front"
_NO_GOOGLE = "Vertex AI's body is answered at /vertex and its health question at /health, on --port: name these to the platform"


@dataclasses.dataclass(frozen=True, slots=True)
class Idle:
    """TGI options that do nothing here. Each says why when it is given."""

    sharded: bool | None = idle(None, "shard over devices", _ONE_WORKER)
    num_shard: int | None = idle(None, "number of shards", _ONE_WORKER, env=("SM_NUM_GPUS",))
    shard_uds_path: str = idle(
        "/tmp/text-generation-server", "socket of the shards", "workers are reached through anonymous memory, not through a socket"
    )
    master_shard_uds_path: str = idle(
        "/tmp/text-generation-server-0", "socket of the first shard", "workers are reached through anonymous memory, not through a socket"
    )
    master_addr: str = idle("localhost", "rendezvous address of the shards", _ONE_WORKER)
    master_port: int = idle(29500, "rendezvous port of the shards", _ONE_WORKER, least=0, most=65535)
    weights_cache_override: str | None = idle(
        None, "folder of the weights", "weights are read from the model folder or the hub cache; give the folder as --model-id"
    )
    disable_custom_kernels: bool = idle(
        False, "only framework kernels", "every kernel here must equal its plain torch form in tests, there is nothing to fall back to"
    )
    cuda_graphs: tuple[int, ...] = idle((1, 2, 4, 8, 16, 32), "batch sizes to capture", "the worker decides what it captures", comma=True)
    attention: str | None = idle(None, "attention implementation", "the device decides its attention", flag=False)
    use_flash_attention: str | None = idle(None, "padded path when false", "there is one path and nothing is padded", flag=False)
    prefill_chunking: str | None = idle(
        None, "chunked prefill", "prompts are always fed in chunks, which never changes an output", flag=False
    )
    tgi_wiggle_room: str | None = idle(
        None, "share of free memory for KV", "the memory plan is measured; use --cuda-memory-fraction", flag=False
    )
    enable_prefill_logprobs: bool = idle(
        False, "serve prompt log-probabilities", "they are always served when asked, up to --max-prompt-logprobs", env=("REQUEST_LOGPROBS",)
    )
    max_image_fetch_size: int = idle(1 << 30, "largest image, bytes", "this version serves text only", least=0)
    prometheus_port: int = idle(
        9000,
        "port of the metrics",
        "metrics are on /metrics of the main port (as in TGI, where nothing listens there)",
        least=0,
        most=65535,
    )
    usage_stats: Literal["on", "no-stack", "off"] = idle("on", "telemetry", "nothing is ever sent anywhere")
    ngrok_authtoken: str | None = idle(None, "ngrok token", _NO_TUNNEL, secret=True)
    ngrok_edge: str | None = idle(None, "ngrok edge", _NO_TUNNEL)
    log_format: str | None = idle(None, "log format", "it does nothing in TGI either; use --json-output", flag=False)
    aip_http_port: str | None = idle(None, "Vertex port", _NO_GOOGLE, flag=False)
    aip_predict_route: str | None = idle(None, "Vertex inference route", _NO_GOOGLE, flag=False)
    aip_health_route: str | None = idle(None, "Vertex health route", _NO_GOOGLE, flag=False)
    hf_hub_enable_hf_transfer: str | None = idle(None, "fast downloads", "the hub client decides how it downloads", flag=False)
    hf_hub_user_agent_origin: str | None = idle(None, "user agent of downloads", "the hub client is left as it is", flag=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    model: Model = Model()
    limits: Limits = Limits()
    batching: Batching = Batching()
    speculation: Speculation = Speculation()
    device: Device = Device()
    serving: Serving = Serving()
    sampling: Sampling = Sampling()
    logging: Logging = Logging()
    testing: Testing = Testing()
    idle: Idle = Idle()
    notes: tuple[str, ...] = ()
    """one line for each thing that was given and is not followed to the letter; logged at start"""

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str] | None = None, *, needs_model: bool = True) -> Config:
        """The configuration of a command line (without the program's name). Raises ConfigError. `needs_model=False`: for `doctor`."""
        environ = os.environ if environ is None else environ
        options = all_options()
        notes: list[str] = []
        flags = from_flags(argv, options)
        env = from_environment(_usable(environ), options)
        path = flags.get("config") or env.get("config")
        given = {**(from_file(Path(path.value), options) if path else {}), **env, **flags}
        notes += [
            f"`{o.name}` ({given[o.name].source}) has no effect: {o.declared.idle}" for o in options if o.declared.idle and o.name in given
        ]
        values = {o.name: given[o.name].value for o in options if o.name in given}
        _check(values, needs_model)
        _settle(values, environ, notes)
        return cls(**{name: _section(section, values) for name, section in _SECTIONS.items()}, notes=tuple(notes))

    def worker_environment(self) -> dict[str, str]:
        """The environment for a child process: ours, with the hub settings decided here, without the API key."""
        hub = {"HF_HUB_CACHE": self.model.huggingface_hub_cache, "HF_TOKEN": self.model.hf_token or ""}
        if self.model.hf_hub_offline:
            hub |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in ("API_KEY", *hub)}
        return kept | {name: value for name, value in hub.items() if value}


_SECTIONS: dict[str, type] = {
    "model": Model,
    "limits": Limits,
    "batching": Batching,
    "speculation": Speculation,
    "device": Device,
    "serving": Serving,
    "sampling": Sampling,
    "logging": Logging,
    "testing": Testing,
    "idle": Idle,
}


def all_options() -> list[Option]:
    return [option for name, section in _SECTIONS.items() for option in options_of(name, section)]


def _section(section: type, values: dict[str, Any]) -> Any:
    return section(**{field.name: values[field.name] for field in dataclasses.fields(section) if field.name in values})


def _usable(environ: Mapping[str, str]) -> dict[str, str]:
    """HOSTNAME is the container's name unless somebody set it to an address: then it is not a wish to listen anywhere."""
    name = environ.get("HOSTNAME")
    if name and _address(name) is None:
        return {key: value for key, value in environ.items() if key != "HOSTNAME"}
    return dict(environ)


def _address(hostname: str) -> str | None:
    if hostname == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(hostname))
    except ValueError:
        return None


def _refuse(message: str) -> ConfigError:
    return ConfigError(f"Argument validation error: {message}")


def _check(values: Mapping[str, Any], needs_model: bool) -> None:
    """Refuse what contradicts itself, in TGI's words where it has some."""
    get = values.get
    if needs_model and not get("model_id") and not get("echo"):
        raise _refuse("`model_id` is not set. Give --model-id FOLDER (or the variable MODEL_ID): a model folder or a hub id")
    top, total, pool, prefill = (
        get(name) for name in ("max_input_tokens", "max_total_tokens", "max_batch_total_tokens", "max_batch_prefill_tokens")
    )
    if top is not None and total is not None and top >= total:
        raise _refuse(
            f"`max_input_tokens` must be < `max_total_tokens`. Given: {top} and {total}. Raise max_total_tokens or lower max_input_tokens"
        )
    if pool is not None and prefill is not None and prefill > pool:
        raise _refuse(f"`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: {prefill} and {pool}")
    if pool is not None and total is not None and total > pool:
        raise _refuse(f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {pool}")
    if pool is not None and top is not None and top >= pool:
        raise _refuse(f"`max_input_tokens` must be < `max_batch_total_tokens`. Given: {top} and {pool}")
    if get("cuda_memory_fraction", 1.0) <= 0:
        raise _refuse("`cuda_memory_fraction` must be > 0 and <= 1")
    shards = get("num_shard")
    if shards is not None and shards < 1:
        raise _refuse("`num_shard` cannot be < 1")
    if get("sharded") and shards == 1:
        raise _refuse("`sharded` is true but `num_shard` <= 1")
    if get("lora_adapters"):
        raise _refuse("`lora_adapters` are not served by this version. Leave them out, or merge an adapter into its model and serve that")
    if get("ngrok"):
        raise _refuse("`ngrok`: this server opens no tunnel (TGI's own panics). Leave it out, and put a reverse proxy in front")
    speculator = get("speculator", "auto")
    unknown = [part for part in speculator.split("+") if part.partition("=")[0] not in SPECULATORS]
    if speculator not in ("auto", "none") and unknown:
        known = f"none, {', '.join(SPECULATORS[:-1])} or {SPECULATORS[-1]}"
        raise _refuse(f"`speculator` {unknown[0]} is not in this version. Use {known}: the output is the same")


def _settle(values: dict[str, Any], environ: Mapping[str, str], notes: list[str]) -> None:
    """Replace what depends on something else by what it comes to."""
    if "rope_factor" in values:
        values.setdefault("rope_scaling", "linear")
    if "rope_scaling" in values:
        values.setdefault("rope_factor", 1.0)
    home = values.get("hf_home") or os.path.join(
        environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/", ".cache"), "huggingface"
    )
    values.setdefault("huggingface_hub_cache", os.path.join(home, "hub"))
    asked = values.get("kv_cache_dtype") or ""
    if asked.startswith("fp8"):
        values["kv_cache_dtype"] = "int8"
        notes.append(f"`kv_cache_dtype` {asked} is served as int8: as many bytes, and nearer to the numbers")
    if "hostname" in values:
        address = _address(values["hostname"])
        if address is None:
            notes.append(f"`hostname` {values['hostname']} is not an IP address: listening on 0.0.0.0")
        values["hostname"] = address or "0.0.0.0"
    if values.get("speculate") == 0:
        values["speculator"] = "none"
    if values.get("speculator") == "none" and not values.get("echo"):
        asked = [name for name in ("speculate", "speculation_max_batch_size", "speculation_controller", "acceptance") if values.get(name)]
        notes += [
            f"`{name}` {values[name]} has no effect without a drafter: decoding is plain and the output is the same" for name in asked
        ]
        values["speculate"] = 0
