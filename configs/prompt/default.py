"""How `mmqa prompt` decodes, and how it holds a model or asks a server."""

from ml_collections import ConfigDict

from mmqa_jax.core.config import auto

MODES = ("runlocal",)


def get_config(mode: str = "") -> ConfigDict:
    """`runlocal`: an engine small enough for a laptop."""
    config = ConfigDict()
    # Of prompts that do not say otherwise (any of these may stand in a line of the file).
    config.decoding = {
        "max_new_tokens": 64,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": (),
        "n": 1,
        "seed": 0,
        "logprobs": False,
        "beams": 0,
        "length_penalty": 0.0,
    }
    # --backend=engine. dtype: auto (float32 on a CPU, bfloat16 elsewhere), float32, bfloat16.
    # mesh auto: copies of the weights, each split over `tensor`, that answer all prompts soonest by
    # the roofline (decoding/job_time.py); all 1 is one device.
    config.model = {"dtype": "auto", "mesh": {"data": auto(), "fsdp": auto(), "tensor": auto()}}
    # See EngineConfig in mmqa_jax/decoding/slot_runner.py. auto: chosen for model, device, its free
    # memory and the prompts (decoding/sizes.py), printed, and named in what --json prints. A number
    # as `length` is the most tokens of a prompt with its answer; auto is what the model reads. Of
    # the cache a slot has as many as the prompts at hand need.
    config.engine = {
        "slots": auto(),
        "length": auto(),
        "buckets": auto(),
        "prefill_tokens": auto(),
        "page": 0,
        "pages": 0,
        "scan_layers": None,
        "cache_dtype": None,
        "weights": "given",  # int8 rounds them; published keeps a rounded checkpoint's codes
        "exact": True,
        "speculate": 1,  # tokens of a sequence in a step, of which all but the first are proposed
        "draft": "",  # path or name of the model that proposes them; "": looked up in the text
    }
    # Whether a chat model thinks before it answers: auto (as it does by itself), off, on, or the
    # number of tokens that thoughts may have beside max_new_tokens.
    config.thinking = "auto"
    # --backend=openai. See ServerConfig in mmqa_jax/prompting/backends/http.py.
    config.server = {
        "concurrency": 8,
        "timeout": 120.0,
        "retries": 6,
        "first_wait": 0.5,
        "longest_wait": 60.0,
        "max_failures": 10,
        "max_tokens_key": "max_completion_tokens",
    }
    if mode == "runlocal":
        config.engine.slots, config.engine.length = 4, 512
    return config
