"""Every limit on what a client may send, in one place. Pure: no IO.

Both front ends go by these numbers. A limit that an operator sets (body size, deadline, queue bound, context
length) is in `RouterConfig` or the model; what stands here is what no operator needs to change.
"""

# Bodies may be as large as the text of a prompt that fills the model's context: a token's text in JSON is rarely longer
# (12 bytes for an escaped letter of another script, 16 for a run of spaces in a program).
BODY_BYTES_PER_TOKEN = 64
MIN_BODY_BYTES = 1 << 20
# JSON nests this deep at most; the schema itself needs five levels.
MAX_JSON_DEPTH = 32
# A gRPC message beyond the body limit is still received, up to this factor, so that it is refused with a clear
# INVALID_ARGUMENT and not by the library.
GRPC_HARD_LIMIT_FACTOR = 4
# In a body that is no valid JSON the faulty field is looked for up to this size (measured: 2.5 s for 1 MiB of numbers
# that end in a NaN, and all that time no other request is answered).
MAX_EXPLAINED_BYTES = 32 << 10
# From the first byte of a request to the end of its head. A connection that has sent nothing yet has as long, and so
# has a TLS handshake.
HEADER_TIMEOUT_S = 10.0
# From the head of a request to the end of its body, and for each message of a gRPC call.
BODY_TIMEOUT_S = 30.0
# Request line and headers together, or a call's metadata.
MAX_HEADER_BYTES = 16 << 10
MAX_HEADERS = 100
# Calls at a time on one gRPC connection; further ones wait in the client.
MAX_GRPC_STREAMS = 100
HANDSHAKE_TIMEOUT_S = 2.0
# Of a gRPC connection without calls. Ending one in order costs its client nothing, and its place may be wanted.
GRPC_IDLE_TIMEOUT_S = 30.0
# Of gRPC health, which asks for no key; each costs five looks a second.
MAX_HEALTH_WATCHERS = 256
# A refused body is read to its end within these bounds, so that the client gets to see the answer.
MAX_DISCARDED_BYTES = 64 << 20
DISCARD_TIMEOUT_S = 0.5
# Connections beyond router.max_connections that get an answer; those that come meanwhile are closed without.
MAX_REFUSED_CONNECTIONS = 64
# Between two requests of an HTTP connection. Longer than the idle time of common proxies (Go's is 90 s): the
# proxy closes first, so no request meets a reset.
KEEP_ALIVE_TIMEOUT_S = 120
# A client that takes nothing from us for this long is gone.
WRITE_TIMEOUT_S = 15.0

MAX_MESSAGES = 1024
MAX_PROMPTS = 64
MAX_CHOICES = 8
# Keys apart, of chat_template_kwargs: each is looked at more than once.
MAX_TEMPLATE_VALUES = 4096
MAX_TOOLS = 128
# Keys apart, of all schemas of a request's tools, or of the arguments of one call.
MAX_TOOL_VALUES = 65536
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 64
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 64
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_CACHE_SALT_LENGTH = 128
MAX_REQUEST_ID_LENGTH = 64
MAX_REQUEST_ID_HEADER_LENGTH = 128
MAX_ABORT_IDS = 256
MAX_TRACE_PARENT_LENGTH = 128
MIN_DEADLINE_S = 0.001
MAX_DEADLINE_S = 86_400.0
MIN_WATCH_INTERVAL_S = 0.1
# Of administrators.
MAX_REPLICAS = 1024
MAX_DRAIN_GRACE_S = 3600.0

# Longer texts, and more ids, are tokenized or detokenized off the event loop (measured: 0.12 ms per 1,000 characters;
# the way to another thread and back costs about 0.1 ms).
MAX_INLINE_TOKENIZE_LENGTH = 4_000

# LoRA adapters that are named, and of those how many an error about a wrong name lists.
MAX_ADAPTERS = 1024
MAX_NAMES_SHOWN = 20
