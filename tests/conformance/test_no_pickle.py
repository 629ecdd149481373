"""Nothing that runs code when it reads data is used anywhere in the product (Q-01): looked up in the syntax trees."""

import ast
from collections.abc import Iterator

import pytest
from yaml.constructor import FullConstructor, SafeConstructor

from router.tenants import key_file
from tests.paths import ROOT

PACKAGES = ("common", "router", "prefill_worker", "decode_worker", "kvtransfer", "deploy")
# Modules whose loaders execute what they load, and calls that pickle inside.
MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"})
CALLS = frozenset(
    {
        *("torch.load", "torch.save", "torch.hub.load", "numpy.load", "np.load"),
        *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
        *("eval", "exec", "__import__"),
    }
)
METHODS = frozenset({"send_pyobj", "recv_pyobj", "allow_pickle"})
# With a loader of our own, which is a safe one: see the last test. And expressions written from the fields of our own
# classes, at import, as the standard library's dataclasses do; no data is in them.
ALLOWED = {"router/tenants/key_file.py": "yaml.load", "common/wire/codec.py": "eval"}
OBJECT_COLLECTIVES = "_object_list", "_object"
COLLECTIVES = frozenset({"all_gather", "broadcast", "gather", "scatter", "send", "recv"})


def faults(source: str) -> Iterator[str]:
    """Each use of something that may run code, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            names = [ast.unparse(node.func), *(keyword.arg or "" for keyword in node.keywords)]
        else:
            continue
        yield from (f"{name} in line {node.lineno}" for name in names if _runs_code(name))


def _runs_code(name: str) -> bool:
    last = name.rpartition(".")[2]
    collective = any(last.endswith(end) and last.removesuffix(end) in COLLECTIVES for end in OBJECT_COLLECTIVES)
    return name.split(".")[0] in MODULES or name in CALLS or last in METHODS or collective


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_reads_data_by_running_it(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if path.parent.name != "pb"]
    assert files
    found = {str(path.relative_to(ROOT)): list(faults(path.read_text())) for path in files}
    uses = [(path, use) for path, names in found.items() for use in names]
    assert [(path, use) for path, use in uses if use.split()[0] != ALLOWED.get(path)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as d\nd.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object",
        "socket.recv_pyobj()",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x')",
        "eval('1')",
    ],
)
def test_each_of_them_would_be_seen(source: str) -> None:
    assert list(faults(source))


def test_what_only_reads_data_is_let_through() -> None:
    assert not list(
        faults("import json, yaml\nyaml.safe_load('x')\njson.loads('x')\nself._evaluate()\ngroup.send([x], 1, 0)")
    )


def test_the_loader_of_the_key_file_makes_plain_values_only() -> None:
    assert issubclass(key_file._Loader, SafeConstructor)
    assert not issubclass(key_file._Loader, FullConstructor)
