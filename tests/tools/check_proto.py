"""Generate `common/wire/pb` from `proto/`, or check that the committed modules are what the compiler writes.

`python -m tests.tools.check_proto` exits 1 when a module is stale; with `--write` it writes them.
"""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

from tests.paths import ROOT

PROTO_DIR = ROOT / "proto"
PB_DIR = ROOT / "common" / "wire" / "pb"
# protoc names modules by their path under proto/; ours live flat in common.wire.pb.
_IMPORT = re.compile(r"^(from|import) pdserve(?:\.\w+)* import (\w+_pb2)", re.MULTILINE)
_PYI_IMPORT = re.compile(r"^from pdserve(?:\.\w+)* import", re.MULTILINE)


def generate() -> dict[str, str]:
    """File name -> content of every generated module."""
    sources = sorted(str(path.relative_to(PROTO_DIR)) for path in PROTO_DIR.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as out:
        includes = [f"-I{PROTO_DIR}", f"-I{files('grpc_tools') / '_proto'}"]
        # The plugin of this environment, whether or not it is activated.
        plugin = f"--plugin=protoc-gen-mypy={Path(sys.executable).with_name('protoc-gen-mypy')}"
        outputs = [plugin, f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}"]
        if protoc.main(["protoc", *includes, *outputs, *sources]) != 0:
            raise SystemExit("protoc failed")
        return {path.name: _flatten(path.read_text()) for path in Path(out).rglob("*_pb2*.py*")}


def _flatten(text: str) -> str:
    return _PYI_IMPORT.sub("from common.wire.pb import", _IMPORT.sub(r"\1 common.wire.pb import \2", text))


def main() -> int:
    generated = generate()
    if "--write" in sys.argv:
        PB_DIR.mkdir(exist_ok=True)
        for name, text in generated.items():
            (PB_DIR / name).write_text(text)
        return 0
    stale = [name for name, text in generated.items() if _committed(name) != text]
    if stale:
        print(f"stale: {', '.join(sorted(stale))}: run `make proto`")
    return 1 if stale else 0


def _committed(name: str) -> str:
    path = PB_DIR / name
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    raise SystemExit(main())
