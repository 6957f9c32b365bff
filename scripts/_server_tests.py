"""llama.cpp's own tests of its server, run against ours: the shim, and what the results mean.

The module is a plugin of pytest: it starts no server that only downloads models, and takes any text
for the one that a test expects.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# A server that does not answer ends the test.
_PATIENCE_S = 120
# llama-server's options with a value that have another name here, or the same; others are left out.
_OPTIONS = {
    "--batch-size": "-ub",
    "--port": "--port", "--host": "--host", "--temp": "--temp", "--seed": "--seed",
    "--alias": "--alias", "--n-predict": "-n", "--api-key": "--api-key", "--ubatch-size": "-ub",
    "--reasoning": "--reasoning", "--chat-template-file": "--chat-template-file",
    "--sleep-idle-seconds": "--sleep-idle", "--cache-ram": "--cache-ram", "-ctk": "-ctk",
    "-ctv": "-ctv", "--cors-origins": "--cors-origin", "--parallel": "-np",
    "--slot-save-path": "--slot-save-path",
}  # fmt: skip


def command(given: Sequence[str]) -> list[str]:
    """Return our command line for llama-server's: always the small model, on the CPU.

    llama-server divides its context by its slots; here each request may use all of it.
    """
    found = [sys.executable, "-m", "moegraph", "serve", "tiny", "--device", "cpu", "-t", "1"]
    values = dict(zip(given, given[1:]))
    for name, value in zip(given, given[1:]):
        if name in _OPTIONS:
            found += [_OPTIONS[name], value]
    found += ["--context-shift"] if "--context-shift" in given else []
    n_slots = int(values.get("--parallel", 4))
    n_ctx = int(values.get("--ctx-size", 4096))
    is_shared = "--kv-unified" in given or "--parallel" not in given
    return [*found, "-c", str(n_ctx if is_shared else n_ctx // n_slots)]


def pytest_load_initial_conftests() -> None:
    """Change llama.cpp's helpers before its tests import them."""
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # nothing is downloaded
    import utils  # type: ignore[import-not-found] # beside llama.cpp's tests

    utils.match_regex = lambda regex, text: isinstance(text, str)
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    server = utils.ServerProcess
    server.make_request = _patient(server.make_request)


def _patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **more: Any) -> Any:
        return ask(*args, **{"timeout": _PATIENCE_S, **more})

    return asked


ABSENT, OTHER = "absent by choice", "another model"


@dataclass(frozen=True)
class Known:
    """A test that fails as it must. sign: what its failure says; another one is a difference."""

    kind: str
    why: str
    sign: str = ""


_ORIGINS = "an origin is named whole, with its port, and no origin is let in by default"
# Kind, why, the sign, and the tests or files; files of which nothing is served are not run.
_KNOWN = (
    (ABSENT, "Google's prediction interface", "", "test_compat_gcp"),
    (ABSENT, "the model makes no embeddings", "", "test_embedding"),
    (ABSENT, "the small model has no tokens for gaps", "", "test_infill"),
    (ABSENT, "words of llama-server's log", "", "test_kv_keep_only_active"),
    (ABSENT, "no adapters", "", "test_lora"),
    (ABSENT, "the server runs no tools", "", "test_mcp_servers test_tools_builtin"),
    (ABSENT, "the server asks no other server for a client", "", "test_proxy"),
    (ABSENT, "the model makes no rankings", "", "test_rerank"),
    (ABSENT, "a server has one model", "", "test_router"),
    (ABSENT, "a request does not choose its slot; ours: test_serve_slots", "", "test_slot_save"),
    (ABSENT, "llama-server's drafters; ours: tests/native", "", "test_speculative"),
    (ABSENT, "a stream that was left is not taken up again", "", "test_stream"),
    (ABSENT, "text only: status 400, and the model is not asked", "",
     "test_vision_api"
     " test_compat_anthropic::test_anthropic_vision_base64_with_multimodal_model"),
    (ABSENT, "a server listens on one address", "return code 2",
     "test_basic::test_server_multiple_addresses"),
    (ABSENT, "no path of the machine", "model_path", "test_basic::test_server_props"),
    (ABSENT, "/slots is always served", "== 501", "test_basic::test_server_slots"),
    (ABSENT, "the page is always served", "== 404", "test_basic::test_no_ui"),
    (ABSENT, "a model has one name", "aliases", "test_basic::test_server_model_aliases_and_tags"),
    (OTHER, "tokens of the prompt", " == ",
     "test_chat_completion::test_chat_completion"
     " test_chat_completion::test_chat_completion_stream"
     " test_chat_completion::test_chat_completion_cached_tokens"
     " test_chat_completion::test_return_progress test_completion::test_completion"
     " test_completion::test_completion_prompt_cache test_completion::test_completion_stream"
     " test_ctx_shift::test_ctx_shift_enabled"
     " test_ctx_shift::test_ctx_shift_disabled_short_prompt"),
    (ABSENT, "beginnings of fewer than 64 tokens are not kept", "0 > 0",
     "test_chat_completion::test_return_progress[64-2-True]"
     " test_metrics::test_metrics_prompt_processed_and_cached"),
    (ABSENT, "no __verbose: /apply-template shows the prompt", "__verbose",
     "test_chat_completion::test_chat_template"
     " test_chat_completion::test_chat_template_assistant_prefill"
     " test_chat_completion::test_chat_template_continue_final_message_vllm_compat"
     " test_chat_completion::test_verbose_debug"),
    (ABSENT, "llama.cpp's templates have names; ours are files", "CHATBOT_TOKEN",
     "test_chat_completion::test_apply_chat_template"),
    (ABSENT, "text only: status 400, and the model is not asked", "400 == 500",
     "test_compat_anthropic::test_anthropic_tool_result_with_image"
     " test_compat_anthropic::test_anthropic_vision_format_accepted"),
    (ABSENT, "no messages are status 400, as at Anthropic", "400 == 200",
     "test_compat_anthropic::test_anthropic_empty_messages"),
    (ABSENT, "an answer that is cut is response.incomplete, as at OpenAI", "None is not None",
     "test_compat_oai_responses::test_responses_stream_with_llama_telemetry"),
    (ABSENT, "probabilities after sampling", "400 == 200",
     "test_completion::test_n_probs_post_sampling"
     " test_completion::test_n_probs_post_backend_sampling"),
    (ABSENT, "ignore_eos is a field of its own, and no bias", " > 0",
     "test_ignore_eos::test_ignore_eos_populates_logit_bias"),
    (OTHER, "so few tokens that the prompt fits", "200 != 200",
     "test_ctx_shift::test_ctx_shift_disabled_long_prompt"),
    (ABSENT, "/metrics is always served", "== 501", "test_metrics::test_metrics_disabled"),
    (ABSENT, "the model makes no embeddings", "404 == 200",
     "test_metrics::test_metrics_embedding_prompt_is_counted"),
    (ABSENT, "n_tokens_max is a maximum, and so a gauge", "gauge",
     "test_metrics::test_metrics_prometheus_format"),
    (ABSENT, "files of llama-server's page", "/sw.js",
     "test_security::test_access_static_assets_without_api_key"),
    (ABSENT, _ORIGINS, "401 == 200",
     "test_security::test_cors_options"),
    (ABSENT, _ORIGINS, "return code 2",
     "test_security::test_cors_origins_localhost_reflects"
     " test_security::test_cors_origins_localhost_rejects"),
    (ABSENT, _ORIGINS, "405 == 200",
     "test_security::test_cors_origins_defaults_to_localhost_with_tools_enabled"),
    (ABSENT, "the server asks no other server for a client", "404 == 200",
     "test_security::test_cors_proxy_only_forwards_explicit_proxy_headers"),
    (ABSENT, "text only: status 400, and the model is not asked", "400 == 200",
     "test_security::test_local_media_file"),
    (ABSENT, "a model that sleeps has no figures of its engine", "moegraph_slots",
     "test_sleep::test_server_sleep_read_only_endpoints"),
    (ABSENT, "--reasoning auto leaves the template's default; llama-server asks for reasoning",
     "Expected prompt to end with", "test_template::test_reasoning"),
    (OTHER, "templates of other models, which need variables of their own", "",
     "test_template::test_date_inside_prompt"),
    (OTHER, "the first token", "<s>", "test_completion::test_completion_response_fields"),
    (OTHER, "the first token", " == 1", "test_tokenize::test_tokenize_with_bos"),
)  # fmt: skip
KNOWN = {name: Known(*about) for *about, names in _KNOWN for name in names.split()}


def known(name: str) -> Known | None:
    """Return what is known of a test, such as test_basic::test_no_ui, or of its file."""
    whole = name.partition("[")[0]
    found = (KNOWN.get(one) for one in (name, whole, whole.partition("::")[0]))
    return next((one for one in found if one is not None), None)
