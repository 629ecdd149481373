"""gRPC options of every channel and server of ours, in one place: both ends must agree.

A client that pings more often than its server allows is cut with GOAWAY "too_many_pings" (a silent prefill is
then killed by its own keepalive), so the client's interval is never below the server's minimum.
Servers never share a port: with SO_REUSEPORT a second process would silently take half the connections.
"""

CLIENT_PING_INTERVAL_MS = 20_000
SERVER_MIN_PING_INTERVAL_MS = 10_000
PING_TIMEOUT_MS = 10_000
# How long the host of a router may be silent before its blocks are taken back: as long as routers wait for a worker
# (router.worker_silence_s). A client gets no GOAWAY for pings of its server, so the interval may be short.
PEER_PING_INTERVAL_MS = 2_000
PEER_SILENCE_MS = 4_000
# How long a connection may take to say that it speaks HTTP/2, TLS included.
HANDSHAKE_LIMIT_MS = 10_000
# Control messages between our own processes: a prompt of a million tokens fits. KV bytes never go over gRPC.
MAX_INTERNAL_MESSAGE_BYTES = 64 << 20

Options = list[tuple[str, int]]


def channel_options(max_message_bytes: int = MAX_INTERNAL_MESSAGE_BYTES) -> Options:
    """Options of a client channel."""
    return [
        ("grpc.keepalive_time_ms", CLIENT_PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),  # a proxy of the environment is for the world outside
        *_message_sizes(max_message_bytes),
    ]


def server_options(max_message_bytes: int = MAX_INTERNAL_MESSAGE_BYTES) -> Options:
    """Options of a server."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_LIMIT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", SERVER_MIN_PING_INTERVAL_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", SERVER_MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        *_message_sizes(max_message_bytes),
    ]


def peer_server_options() -> Options:
    """Options of a worker's server. A router or prefill worker whose host is gone ends no connection: it is asked."""
    return [
        *server_options(),
        ("grpc.keepalive_time_ms", PEER_PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", PEER_SILENCE_MS),
    ]


def _message_sizes(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
