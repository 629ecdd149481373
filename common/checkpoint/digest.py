"""A cheap digest of model files: what two workers compare before one takes the other's KV."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

EDGE_BYTES = 1 << 20


def digest_files(texts: Iterable[bytes], weight_files: Iterable[Path]) -> str:
    """Hex sha256 over `texts` and, per weight file, its size and its first and last MiB.

    Reads at most 2 MiB per file. Safetensors and GGUF keep all names, types and shapes at the front, so another
    model or another quantization differs; a change in the middle of a file is not seen.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    for path in sorted(weight_files):
        digest.update(_file_edges(path))
    return digest.hexdigest()


def _file_edges(path: Path) -> bytes:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(EDGE_BYTES)
        file.seek(max(len(head), size_bytes - EDGE_BYTES))
        return size_bytes.to_bytes(8, "little") + head + file.read(EDGE_BYTES)
