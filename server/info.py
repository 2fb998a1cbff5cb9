"""`GET /info`: the model and the limits in force, for clients that size their requests by it."""

from __future__ import annotations

from forerun import __version__, hub
from forerun.config import Config
from forerun.router.service import Router
from forerun.server.schema import Info

TGI_VERSION = "3.3.6-dev0"
"""Clients read the version to know what they may send (llama-index wants 2.0.1 or later)."""


def info(config: Config, router: Router) -> Info | None:
    """None while the worker is loading: the limits are not known yet."""
    limits, ready = router.limits, router.ready
    if limits is None or ready is None:
        return None
    return Info(
        model_id=config.model.model_id,
        model_sha=hub.commit(config.model.model_id, config.model.revision, config.model.huggingface_hub_cache),
        model_pipeline_tag=None,
        max_concurrent_requests=limits.max_concurrent_requests,
        max_best_of=config.limits.max_best_of,
        max_stop_sequences=config.limits.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=config.serving.validation_workers,
        max_client_batch_size=config.limits.max_client_batch_size,
        router="text-generation-router",
        version=TGI_VERSION,
        sha=None,
        docker_label=None,
        max_top_n_tokens=config.limits.max_top_n_tokens,
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_total_tokens=limits.max_batch_total_tokens,
        server="forerun",
        server_version=__version__,
        model_dtype=ready.dtype,
        model_device_type=ready.device,
        speculator=ready.drafter,
        speculate=ready.max_nodes,
    )
