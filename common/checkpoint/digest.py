"""A cheap digest of model files: what two workers compare before one takes the other's KV."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

EDGE_BYTES = 1 << 20
SAMPLE_BYTES = 4 << 10
NUM_SAMPLES = 1024


def digest_files(texts: Iterable[bytes], weight_files: Iterable[Path]) -> str:
    """Hex sha256 over `texts` and, per weight file, its size, its first and last MiB and pages evenly spread between.

    Reads at most 6 MiB per file. Safetensors and GGUF keep all names, types and shapes at the front, so another
    model or another quantization differs there; training changes weights everywhere, so another fine-tune differs
    in the pages. An edit of fewer bytes than lie between two pages (1/1024 of a file) can go unseen.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    for path in sorted(weight_files):
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    size_bytes = path.stat().st_size
    yield size_bytes.to_bytes(8, "little")
    with path.open("rb") as file:
        yield file.read(EDGE_BYTES)
        middle = range(EDGE_BYTES, size_bytes - EDGE_BYTES)
        for start in middle[:: max(SAMPLE_BYTES, len(middle) // NUM_SAMPLES)]:
            file.seek(start)
            yield file.read(SAMPLE_BYTES)
        file.seek(max(EDGE_BYTES, size_bytes - EDGE_BYTES))
        yield file.read(EDGE_BYTES)
