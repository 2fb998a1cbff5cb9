"""Every launcher flag and variable is taken, in clap's grammar and with TGI's precedence; contradictions are refused with a cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.config import Config, all_options
from forerun.options import ConfigError

LAUNCHER = (
    "model-id", "revision", "validation-workers", "sharded", "num-shard", "quantize", "speculate", "dtype", "kv-cache-dtype",
    "trust-remote-code", "max-concurrent-requests", "max-best-of", "max-stop-sequences", "max-top-n-tokens", "max-input-tokens",
    "max-input-length", "max-total-tokens", "waiting-served-ratio", "max-batch-prefill-tokens", "max-batch-total-tokens",
    "max-waiting-tokens", "max-batch-size", "cuda-graphs", "hostname", "port", "prometheus-port", "shard-uds-path", "master-addr",
    "master-port", "huggingface-hub-cache", "weights-cache-override", "disable-custom-kernels", "cuda-memory-fraction",
    "rope-scaling", "rope-factor", "json-output", "otlp-endpoint", "otlp-service-name", "cors-allow-origin", "api-key",
    "watermark-gamma", "watermark-delta", "ngrok", "ngrok-authtoken", "ngrok-edge", "tokenizer-config-path",
    "disable-grammar-support", "env", "max-client-batch-size", "lora-adapters", "usage-stats", "payload-limit",
    "enable-prefill-logprobs", "graceful-termination-timeout",
)  # fmt: skip
ROUTER = ("max-image-fetch-size", "tokenizer-name", "master-shard-uds-path")
VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE", "HF_HOME",
    "HF_HUB_ENABLE_HF_TRANSFER", "HF_HUB_USER_AGENT_ORIGIN", "ATTENTION", "PREFIX_CACHING", "PREFILL_CHUNKING", "USE_FLASH_ATTENTION",
    "TGI_WIGGLE_ROOM", "REQUEST_LOGPROBS", "COMPUTE_TYPE", "LOG_LEVEL", "LOG_COLORIZE", "AIP_HTTP_PORT", "AIP_PREDICT_ROUTE",
    "AIP_HEALTH_ROUTE", "HF_MODEL_ID", "HF_MODEL_REVISION", "SM_NUM_GPUS", "HF_MODEL_QUANTIZE", "HF_MODEL_TRUST_REMOTE_CODE",
)  # fmt: skip
OURS = (
    "device", "speculator", "speculation-max-batch-size", "speculation-controller", "threads", "log-json", "max-inter-token-ms",
    "allow-pickle", "max-prompt-logprobs", "test-faults", "echo",
)  # fmt: skip

EXAMPLES = {int: "7", float: "1.0", bool: "true", str: "text"}
OPTIONS = all_options()


@pytest.fixture(scope="module")
def sources() -> str:
    root = Path(__file__).resolve().parents[2]
    files = [
        path
        for part in ("server", "router", "forerun")
        for path in (root / part).rglob("*.py")
        if path.name not in ("config.py", "options.py")
    ]
    return "\n".join(path.read_text() for path in files)


def parse(*argv: str, **environ: str) -> Config:
    return Config.parse(["--model-id", "m", *argv], environ)


def example(name: str) -> str:
    option = next(o for o in OPTIONS if o.name == name)
    return option.choices[0] if option.choices else EXAMPLES[option.kind]


def get(config: Config, name: str) -> object:
    option = next(o for o in OPTIONS if o.name == name)
    return getattr(getattr(config, option.section), name)


def test_all_flags_are_declared() -> None:
    flags = {flag for option in OPTIONS for flag in option.flags}
    assert {f"--{name}" for name in [*LAUNCHER, *ROUTER, *OURS]} <= flags
    assert {"-p", "-g", "-e"} <= flags


def test_every_flag_has_its_variable() -> None:
    variables = {variable for option in OPTIONS for variable in option.variables}
    assert {name.replace("-", "_").upper() for name in [*LAUNCHER, *ROUTER] if name != "env"} | set(VARIABLES) <= variables
    assert "ENV" not in variables


def test_names_are_unique() -> None:
    for names in ([o.name for o in OPTIONS], [f for o in OPTIONS for f in o.flags], [v for o in OPTIONS for v in o.variables]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_each_option_is_read_from_flag_variable_and_file(option, tmp_path: Path) -> None:
    own = ("config", "speculator", "hostname", "model_id", "cuda_memory_fraction", "rope_factor", "speculate", "lora_adapters", "ngrok")
    if option.name in own:
        return  # they have tests of their own
    text = example(option.name)
    quoted = text if option.kind is not str else f'"{text}"'
    file = tmp_path / "file.toml"
    file.write_text(f"[{option.section}]\n{option.name.replace('_', '-')} = {f'[{quoted}]' if option.many else quoted}\n")
    found = [get(Config.parse([], {"MODEL_ID": "m", variable: text}), option.name) for variable in option.variables]
    found.append(get(parse("--config", str(file)), option.name))
    for flag in option.flags:
        found.append(get(parse(*([flag] if option.switch else [flag, text])), option.name))
        found.append(get(parse(f"{flag}={text}"), option.name))
    expected = option.value(text, "test")
    assert found == [expected] * len(found)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.declared.idle], ids=lambda option: option.name)
def test_an_idle_option_says_why_and_a_silent_one_nothing(option) -> None:
    config = Config.parse([], {"MODEL_ID": "m", option.variables[0]: example(option.name)})
    assert len(config.notes) == 1
    assert option.name in config.notes[0]
    assert option.declared.idle in config.notes[0]
    assert parse().notes == ()


def test_flags_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("port = 1\nmax_best_of = 3\n[limits]\nmax-stop-sequences = 9\n")
    config = parse("--config", str(file), "--port", "3", PORT="2", MAX_BEST_OF="5")
    assert (config.serving.port, config.limits.max_best_of, config.limits.max_stop_sequences) == (3, 5, 9)
    assert config.limits.max_top_n_tokens == 5
    assert parse(FORERUN_CONFIG=str(file)).serving.port == 1


@pytest.mark.parametrize("argv", [["-p", "80"], ["-p80"], ["-p=80"], ["--port", "80"], ["--port=80"]])
def test_short_and_joined_forms(argv: list[str]) -> None:
    assert parse(*argv).serving.port == 80


def test_lists() -> None:
    config = parse("--cors-allow-origin", "a", "--cors-allow-origin=b", "--cuda-graphs", "1,2")
    assert config.serving.cors_allow_origin == ("a", "b")
    assert config.idle.cuda_graphs == (1, 2)
    assert parse(CORS_ALLOW_ORIGIN="a,b").serving.cors_allow_origin == ("a,b",)


def test_adapters_are_refused_rather_than_answered_by_the_base_model() -> None:
    for given in (["--lora-adapters", "x=y@z,w"], ["--lora-adapters=x"]):
        with pytest.raises(ConfigError, match=r"not served by this version.*merge"):
            parse(*given)
    with pytest.raises(ConfigError, match="merge"):
        parse(LORA_ADAPTERS="x")
    assert parse(LORA_ADAPTERS="").model.lora_adapters == ()


@pytest.mark.parametrize(("word", "value"), [("true", True), ("1", True), ("YES", True), ("false", False), ("0", False), ("off", False)])
def test_booleans_in_the_environment(word: str, value: bool) -> None:
    assert parse(TRUST_REMOTE_CODE=word).model.trust_remote_code is value
    assert parse("--prefix-caching", word).batching.prefix_caching is value


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--max-total-token", "5"], {}, "unexpected argument '--max-total-token'; did you mean '--max-total-tokens'"),
        (["--max_total_tokens", "5"], {}, "did you mean '--max-total-tokens'"),
        (["stray"], {}, "unexpected argument 'stray'"),
        (["--zzzzzz"], {}, "see `forerun serve --help`"),
        (["--port"], {}, "a value is required for '--port <N>'"),
        (["--port", "--env"], {}, "a value is required for '--port <N>'"),
        (["--port", "http"], {}, "invalid value 'http' for '--port': expected a whole number"),
        (["--port", "-1"], {}, "`port` must be >= 0"),
        (["--port", "65536"], {}, "`port` must be <= 65535"),
        (["--port", "1", "-p", "2"], {}, "'--port'"),
        (["--port", "1", "--port", "2"], {}, "'--port' cannot be used multiple times"),
        (["--json-output=maybe"], {}, "expected true or false"),
        (["--quantize", "int3"], {}, "choose one of int8, int4, awq,"),
        (["--waiting-served-ratio", "nan"], {}, "expected a number"),
        (["--revision="], {}, "it is empty"),
        ([], {"PORT": "http"}, "environment variable PORT"),
        ([], {"API_KEY": ""}, "it is empty"),
        (["--validation-workers", "0"], {}, "`validation_workers` must be >= 1"),
        (["--max-batch-size", "0"], {}, "`max_batch_size` must be >= 1"),
        (["--num-shard", "0"], {}, "`num_shard` cannot be < 1"),
        (["--sharded", "true", "--num-shard", "1"], {}, "`sharded` is true but `num_shard` <= 1"),
        (["--max-input-tokens", "9", "--max-total-tokens", "9"], {}, "Argument validation error: `max_input_tokens` must be <"),
        (["--max-total-tokens", "9", "--max-batch-total-tokens", "8"], {}, "`max_total_tokens` must be <= `max_batch_total_tokens`"),
        (["--max-batch-prefill-tokens", "9", "--max-batch-total-tokens", "8"], {}, "`max_batch_prefill_tokens` must be <="),
        (["--max-input-tokens", "9", "--max-batch-total-tokens", "9"], {}, "`max_input_tokens` must be < `max_batch_total_tokens`"),
        (["--max-input-tokens", "9", "--max-input-length", "9"], {}, "two names of one option: give only '--max-input-tokens'"),
        ([], {"MAX_INPUT_TOKENS": "9", "MAX_INPUT_LENGTH": "8"}, "keep only MAX_INPUT_TOKENS"),
        (["--cuda-memory-fraction", "0"], {}, "`cuda_memory_fraction` must be > 0"),
        (["--speculator", "oracle=DIR"], {}, "mlp, model, mtp, ngram, remote or suffix"),
        (["--speculator", "suffix+oracle=DIR"], {}, "mlp, model, mtp, ngram, remote or suffix"),
        (["--config", "/nowhere.toml"], {}, "cannot read --config /nowhere.toml"),
    ],
)  # fmt: skip
def test_refused_with_a_cure(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(*argv, **environ)
    assert message in str(refused.value)


def test_a_missing_model_is_refused_unless_none_is_needed() -> None:
    with pytest.raises(ConfigError, match="--model-id FOLDER"):
        Config.parse([], {})
    assert Config.parse([], {}, needs_model=False).model.model_id == ""
    assert Config.parse(["--echo"], {}).testing.echo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "did you mean 'port'"),
        ("[serving]\nmax_best_of = 1", "unexpected key in"),
        ("port = 1\n[serving]\nport = 2", "gives `port` twice"),
        ("port = 'x'", "invalid value 'x'"),
        ("port = ", "is not TOML"),
        ("port = true", "expected a whole number"),
        ("model_id = 3", "expected text"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "f.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        parse("--config", str(file))
    assert message in str(refused.value)


def test_secrets_are_not_shown() -> None:
    config = parse("--api-key", "s3cret", HF_TOKEN="t0ken", NGROK_AUTHTOKEN="n0ne", OTLP_ENDPOINT="http://me:w0rd@collector/v1")
    assert config.serving.api_key == "s3cret"
    for secret in ("s3cret", "t0ken", "n0ne", "w0rd"):
        assert secret not in repr(config) + "".join(config.notes)


def test_an_empty_variable_is_not_set() -> None:
    assert parse(PORT="", HF_TOKEN="", MAX_INPUT_TOKENS="").serving.port == 3000


@pytest.mark.parametrize(
    ("argv", "variable", "address", "notes"),
    [
        ([], "4f1a2b3c", "0.0.0.0", 0),
        ([], "127.0.0.1", "127.0.0.1", 0),
        (["--hostname", "::1"], "pod-1", "::1", 0),
        (["--hostname", "localhost"], "", "127.0.0.1", 0),
        (["--hostname", "myhost"], "", "0.0.0.0", 1),
    ],
)
def test_hostname(argv: list[str], variable: str, address: str, notes: int) -> None:
    """A container's HOSTNAME is its name, no wish to listen anywhere."""
    config = parse(*argv, HOSTNAME=variable)
    assert (config.serving.hostname, len(config.notes)) == (address, notes)


def test_variables_that_kubernetes_sets_do_no_harm() -> None:
    config = parse(PROMETHEUS_PORT="tcp://10.0.0.1:9090", MASTER_PORT="tcp://10.0.0.1:1")
    assert config.idle.prometheus_port == 9000
    assert len(config.notes) == 2


def test_the_container_conventions() -> None:
    config = Config.parse([], {"HF_MODEL_ID": "m", "HF_MODEL_REVISION": "r", "SM_NUM_GPUS": "1", "HF_MODEL_TRUST_REMOTE_CODE": "true"})
    assert (config.model.model_id, config.model.revision, config.model.trust_remote_code) == ("m", "r", True)
    assert parse(MODEL_ID="n", HF_MODEL_ID="o").model.model_id == "m"
    assert Config.parse([], {"MODEL_ID": "n", "HF_MODEL_ID": "o"}).model.model_id == "n"


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "HOME": "/h"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/huggingface/hub"),
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({}, "/.cache/huggingface/hub"),
    ],
)
def test_the_hub_cache(environ: dict[str, str], cache: str) -> None:
    assert parse(**environ).model.huggingface_hub_cache == cache


def test_a_worker_gets_the_hub_settings_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "k")
    monkeypatch.setenv("OTHER", "o")
    environ = parse("--hf-hub-offline", "--api-key", "k", HF_HOME="/b", HF_TOKEN="t").worker_environment()
    assert (environ["HF_HUB_OFFLINE"], environ["HF_HUB_CACHE"], environ["HF_TOKEN"], environ["OTHER"]) == ("1", "/b/hub", "t", "o")
    assert "API_KEY" not in environ


def test_rope() -> None:
    assert (parse("--rope-factor", "2").model.rope_scaling, parse("--rope-factor", "2").model.rope_factor) == ("linear", 2.0)
    assert parse("--rope-scaling", "dynamic").model.rope_factor == 1.0
    assert parse().model.rope_scaling is None


def test_speculation_is_honest() -> None:
    assert parse().speculation.speculator == "auto"
    config = parse("--speculator", "none", "--speculation-max-batch-size", "8", "--speculation-controller", "fixed")
    assert (config.speculation.speculate, len(config.notes)) == (0, 2)
    assert all("without a drafter" in note for note in config.notes)
    config = parse("--speculate", "2", "--speculation-max-batch-size", "8")
    assert (config.speculation.speculator, config.speculation.speculate, config.notes) == ("auto", 2, ())
    assert parse("--speculator", "none", "--speculate", "0").notes == ()


def test_no_guesses_at_all_is_no_speculator() -> None:
    """A worker takes 0 guesses for "as many as the drafter likes"."""
    for argv in (["--speculate", "0"], ["--speculate", "0", "--speculator", "ngram"]):
        assert parse(*argv).speculation.speculator == "none"
    assert parse("--speculate", "3").speculation.speculator == "auto"
    assert parse("--speculator", "suffix=chain+ngram").speculation.speculator == "suffix=chain+ngram"


UNREAD = {
    "hf_home": "decides huggingface_hub_cache, in config.py itself",
    "hf_token": "handed on by worker_environment",
    "lora_adapters": "refused in config.py itself",
    "ngrok": "refused in config.py itself",
}


@pytest.mark.parametrize("option", [o for o in OPTIONS if not o.declared.idle], ids=lambda option: option.name)
def test_an_option_that_claims_an_effect_is_read_by_somebody(option, sources: str) -> None:
    read = re.search(rf"\.{option.name}\b", sources) is not None
    assert read != (option.name in UNREAD), (
        "declare it `idle` and say why, or list it above" if not read else "it is read now: take it off the list"
    )


@pytest.mark.parametrize(
    "argv",
    [[], ["--max-input-tokens", "4095"], ["--max-total-tokens", "4096"], ["--max-input-tokens", "4095", "--max-total-tokens", "4096"]],
)
def test_either_limit_may_be_given_alone(argv: list[str]) -> None:
    """D07: what is left open is settled by the worker, not by a default that contradicts the other."""
    config = parse(*argv)
    assert config.limits.max_input_tokens == (4095 if "--max-input-tokens" in argv else None)
    assert config.limits.max_total_tokens == (4096 if "--max-total-tokens" in argv else None)


@pytest.mark.parametrize("argv", [["--ngrok"], ["--ngrok", "--ngrok-authtoken", "x"]])
def test_a_tunnel_is_refused_and_so_is_its_variable(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="put a reverse proxy in front"):
        parse(*argv)
    with pytest.raises(ConfigError, match="no tunnel"):
        parse(NGROK="true")
    assert len(parse("--ngrok-authtoken", "x", NGROK="false").notes) == 1


@pytest.mark.parametrize("value", ["on", "no-stack", "off"])
def test_usage_statistics_are_taken_and_never_sent(value: str) -> None:
    assert "nothing is ever sent anywhere" in parse("--usage-stats", value).notes[0]
    assert parse(USAGE_STATS=value).idle.usage_stats == value
    with pytest.raises(ConfigError, match="choose one of on, no-stack, off"):
        parse("--usage-stats", "maybe")
