"""Bring the chart's schema up to date with `common/values/config.py`, or check that it is.

`python -m tests.tools.chart_schema` exits 1 when it is stale; with `--write` it rewrites the definitions that
mirror the configuration. The rest of values.schema.json is written by hand.
"""

import json
import sys
from typing import Any

from pydantic import BaseModel

from common.values.config import AutoscaleSettings, PoolSettings, RouterSettings, WorkerSettings
from tests.paths import ROOT

SCHEMA_PATH = ROOT / "deploy" / "helm" / "pdserve" / "values.schema.json"
# What the chart decides: identities, addresses and what it has values of its own for; and no secret in a ConfigMap.
DECIDED_BY_CHART = frozenset(("router_id", "host", "port", "http_port", "grpc_port", "metrics_port"))
# These are the pools' own minReplicas and maxReplicas, and the router's Service.
DECIDED_BY_CHART |= {"prefill_min", "prefill_max", "decode_min", "decode_max", "router_url"}
# The pools' own replicas; routers are a Deployment.
DECIDED_BY_CHART |= {"prefill", "decode", "routers"}
# From Secrets, by `tls` in the values.
DECIDED_BY_CHART |= {"cert_file", "key_file", "admin_key", "admin_key_file", "api_keys_file"}
_LINE = 118


def definition(config: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of the fields of `config` that the chart's user may set."""
    properties = config.model_json_schema()["properties"]
    kept = {name: _plain(schema) for name, schema in properties.items() if name not in DECIDED_BY_CHART}
    return {"type": "object", "additionalProperties": False, "properties": kept}


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("title", "default")}


def expected() -> str:
    """values.schema.json with these definitions up to date."""
    schema = json.loads(SCHEMA_PATH.read_text())
    schema["$defs"]["routerConfig"] = definition(RouterSettings)
    schema["$defs"]["poolsConfig"] = definition(PoolSettings)
    schema["$defs"]["autoscaleConfig"] = definition(AutoscaleSettings)
    schema["$defs"]["workerConfig"] = definition(WorkerSettings)
    return to_text(schema) + "\n"


def to_text(value: Any, indent: int = 0) -> str:
    """JSON with what fits on one line."""
    line = json.dumps(value)
    if len(line) + indent <= _LINE or not isinstance(value, dict | list):
        return line
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        inner = [f"{pad}{json.dumps(key)}: {to_text(each, indent + 2)}" for key, each in value.items()]
        return "{\n" + ",\n".join(inner) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + to_text(each, indent + 2) for each in value) + "\n" + " " * indent + "]"


def main() -> int:
    text = expected()
    if "--write" in sys.argv:
        SCHEMA_PATH.write_text(text)
        return 0
    if SCHEMA_PATH.read_text() != text:
        print("values.schema.json is stale: run `python -m tests.tools.chart_schema --write`")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
