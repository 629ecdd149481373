"""The options that several commands share, and what may be chosen. Values only."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class KVCacheDtype(StrEnum):
    AUTO = "auto"
    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"


class Quantization(StrEnum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class Speculation(StrEnum):
    OFF = "off"
    NGRAM = "ngram"


class Attention(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    TRITON = "triton"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Purpose(StrEnum):
    UP = "up"
    ROUTER = "router"
    WORKER = "worker"


ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; pdserve config show names them.")
]
Model = Annotated[str | None, typer.Option(help="Hugging Face directory or GGUF file; default: the demo model.")]
Lora = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=DIR", help="A LoRA adapter, served as a model of that name; may be repeated."),
]
RedisUrl = Annotated[str | None, typer.Option(help="Redis of the cluster.", show_default=False)]
OwnRedisUrl = Annotated[str | None, typer.Option(help="Redis to use; default: one of our own.", show_default=False)]
Wait = Annotated[bool, typer.Option("--wait", help="Until the pools have their sizes again.")]
HttpPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the HTTP API (8000).")]
GrpcPort = Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the gRPC API (50051).")]
LocalPrefill = Annotated[
    int | None, typer.Option(min=0, help="Up to so many uncached tokens are prefilled on the decode worker.")
]
Autoscale = Annotated[
    bool | None, typer.Option("--autoscale/--no-autoscale", help="Let the load decide the sizes, within autoscale.*.")
]
Traces = Annotated[
    str | None, typer.Option("--otlp-traces-endpoint", help="Send traces there (http://host:4318/v1/traces).")
]
Tls = Annotated[Path | None, typer.Option("--tls", help="Directory of pdserve certs: TLS between all and to clients.")]
Insecure = Annotated[
    bool | None, typer.Option("--insecure/--no-insecure", help="Listen beyond loopback without TLS, if asked to.")
]
Server = Annotated[str, typer.Option(envvar="PDSERVE_SERVER", help="gRPC address of a router.")]
Url = Annotated[str, typer.Option(envvar="PDSERVE_URL", help="HTTP address of a router.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seconds = Annotated[float, typer.Option(min=0.0, help="How long to wait, in seconds.")]
