"""A chunk's bytes: header, encryption, and every planted fault that must be seen."""

from collections.abc import Callable

import pytest
import torch

from tests.interpreter import import_triton_interpreted

import_triton_interpreted()

from common.engine.devices.triton.chunk import pack_chunk, unpack_chunk  # noqa: E402
from common.engine.kv.cache import KVCache, KVShape  # noqa: E402
from common.engine.kv.quantized import dequantize, quantize  # noqa: E402
from common.engine.kv.rows import read_rows, write_rows  # noqa: E402
from common.values.ids import TransferId  # noqa: E402
from kvtransfer.chunk import payload  # noqa: E402
from kvtransfer.chunk.aead import KEY_BYTES, Aead, AeadKind, plaintext  # noqa: E402
from kvtransfer.chunk.codec import ChunkCodec  # noqa: E402
from kvtransfer.chunk.kv_packer import KVPacker, NumpyKVPacker, TorchKVPacker, bytes_per_token_layer, kv_packer  # noqa: E402
from kvtransfer.chunk.payload import HEADER_BYTES  # noqa: E402
from kvtransfer.chunk.plan import FRAME_BYTES, ChunkPlanner  # noqa: E402
from kvtransfer.chunk.staging import StagingPool  # noqa: E402
from kvtransfer.events import Chunk  # noqa: E402
from tests.kvtransfer.cluster import new_cache, new_transfer_id, put_rows, request_rows, rows_of  # noqa: E402

KEY = bytes(range(KEY_BYTES))
TRANSFER, TABLE = new_transfer_id("r1"), (3, 4)
NOT_ENCRYPTED = "chunk 0: not what the peer encrypted for this place on the link"


def chunk_of(kv: torch.Tensor, layers: tuple[int, int], tokens: tuple[int, int], seq: int = 0) -> Chunk:
    planner = ChunkPlanner(kv.shape[0], bytes_per_token_layer(kv), 1)
    return Chunk(seq, *layers, *tokens, planner.num_bytes(layers[1] - layers[0], tokens[1] - tokens[0]))


def rows_by_kernels(kv: torch.Tensor) -> KVPacker:
    """As on a GPU, under triton's interpreter."""
    return TorchKVPacker(kv, pack_chunk, unpack_chunk)


@pytest.mark.parametrize("rows_type", [NumpyKVPacker, TorchKVPacker, rows_by_kernels])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_sizes", [(16, 32), (32, 16), (16, 16), (8, 64)])
@pytest.mark.parametrize("tokens", [(0, 1), (0, 16), (15, 17), (5, 100), (31, 33), (96, 100)])
def test_a_chunk_survives_the_way_between_block_sizes(
    rows_type: Callable[[torch.Tensor], KVPacker],
    dtype: torch.dtype,
    block_sizes: tuple[int, int],
    tokens: tuple[int, int],
) -> None:
    source, target = (new_cache(size).to(dtype) for size in block_sizes)
    rows = request_rows(1, 100).to(dtype)
    source_table = tuple(range(100 // block_sizes[0], -1, -1))
    target_table = tuple(range(1, 100 // block_sizes[1] + 2))
    for layer in range(4):
        put_rows(source, source_table, layer, 0, rows[layer])
    chunk = chunk_of(source, (1, 3), tokens)
    data = torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    rows_type(source).gather(chunk, source_table, data)
    rows_type(target).scatter(chunk, target_table, data)
    expected = torch.zeros_like(rows)
    expected[1:3, :, tokens[0] : tokens[1]] = rows[1:3, :, tokens[0] : tokens[1]]
    assert torch.equal(rows_of(target, target_table, 100), expected)
    assert int(target.count_nonzero()) == int(expected.count_nonzero())


@pytest.mark.parametrize("rows_type", [NumpyKVPacker, TorchKVPacker, rows_by_kernels])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_rows_travel_with_their_scales(
    rows_type: Callable[[torch.Tensor], KVPacker], kind: torch.dtype
) -> None:
    shape = KVShape(num_layers=3, num_kv_heads=3, head_dim=64, dtype=kind)
    source, target = KVCache(shape, 4, 16), KVCache(shape, 3, 32)
    chunk = chunk_of(source.data, (1, 3), (5, 40))
    assert chunk.num_bytes - FRAME_BYTES == 35 * shape.bytes_per_token * 2 // 3
    k, v = torch.randn(2, 35, 3, 64, generator=torch.Generator().manual_seed(0))
    at_source = torch.tensor([(3, 0, 2)[p // 16] * 16 + p % 16 for p in range(5, 40)])
    at_target = torch.tensor([(2, 1)[p // 32] * 32 + p % 32 for p in range(5, 40)])
    write_rows(source.layers[2], at_source, k, v)
    data = torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    rows_type(source.data).gather(chunk, (3, 0, 2), data)
    rows_type(target.data).scatter(chunk, (2, 1), data)
    got = read_rows(target.layers[2], at_target, 64, torch.float32)
    for rows, expected in zip(got, (k, v), strict=True):
        torch.testing.assert_close(rows, expected, rtol=1 / 15, atol=0.02)
        assert torch.equal(rows, dequantize(quantize(expected, kind), kind, 3, 64))


def test_copies_wait_for_the_fence_on_their_stream_before_they_touch_the_cache() -> None:
    log: list[object] = []

    class LoggingFence:
        def mark(self, num_layers: int) -> None: ...

        def mark_step(self) -> None: ...

        def wait_for_layers(self, stream: object, num_layers: int) -> None:
            log.append(num_layers)

        def wait_for_all(self, stream: object) -> None:
            log.append("all")

    def copy(name: str) -> Callable[..., None]:
        return lambda *_: log.append(name)

    kv = new_cache(16)
    rows = TorchKVPacker(kv, copy("pack"), copy("unpack"), LoggingFence())
    chunk = chunk_of(kv, (1, 3), (0, 5))
    data = torch.zeros(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    rows.gather(chunk, (0,), data)
    rows.scatter(chunk, (0,), data)
    assert log == [3, "pack", "all", "unpack"]


def test_rows_of_an_odd_number_of_bytes_are_copied() -> None:
    source, target = (
        torch.arange(2 * 2 * 4 * 4 * 1 * 3, dtype=torch.uint8).view(2, 2, 4, 4, 1, 3),
        torch.zeros(2, 2, 2, 8, 1, 3, dtype=torch.uint8),
    )
    chunk = chunk_of(source, (0, 2), (0, 7))
    data = torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    NumpyKVPacker(source).gather(chunk, (3, 0), data)
    NumpyKVPacker(target).scatter(chunk, (1,), data)
    assert torch.equal(rows_of(target, (1,), 7), rows_of(source, (3, 0), 7))


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="6-D"):
        kv_packer(torch.zeros(2, 2, 4, 16, 8))
    with pytest.raises(ValueError, match="contiguous"):
        kv_packer(new_cache(16).transpose(0, 1))


@pytest.mark.parametrize("block_table", [(0,), (0, 64), (0, -1)])
def test_a_block_table_that_does_not_fit_is_a_bug(block_table: tuple[int, ...]) -> None:
    kv = new_cache(16)
    chunk = chunk_of(kv, (0, 1), (0, 20))
    with pytest.raises(AssertionError, match="block table"):
        NumpyKVPacker(kv).gather(chunk, block_table, torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8))


class Packed:
    """A chunk packed by a sender, in a buffer as a receiver would have it. Opens once, like every message."""

    def __init__(self, kind: AeadKind = AeadKind.AES_GCM, seq: int = 0) -> None:
        self.kv = new_cache(16)
        self.kv.copy_(torch.randn(self.kv.shape, generator=torch.Generator().manual_seed(1)))
        rows: KVPacker = kv_packer(self.kv)
        self.chunk = chunk_of(self.kv, (0, 2), (0, 20), seq)
        self.pool = StagingPool(1 << 20, torch.device("cpu"), is_pinned=False)
        self.codec = ChunkCodec(rows, Aead(kind, KEY))
        self.buffer = self.pool.acquire(self.chunk.num_bytes)
        self.codec.prepare(self.chunk, self.buffer)
        packed = self.pool.acquire(self.chunk.num_bytes)
        ChunkCodec(rows, Aead(kind, KEY)).pack(TRANSFER, self.chunk, TABLE, packed)
        self.buffer[: self.chunk.num_bytes] = packed[: self.chunk.num_bytes]

    def open(self, chunk: Chunk | None = None, transfer_id: TransferId = TRANSFER) -> str | None:
        return self.codec.open(transfer_id, chunk or self.chunk, self.buffer)

    @property
    def data(self) -> torch.Tensor:
        return self.buffer[payload.data_range(self.chunk)]


def plain_data() -> torch.Tensor:
    return Packed(AeadKind.NONE).data


@pytest.mark.parametrize("kind", AeadKind)
def test_an_intact_chunk_opens_to_what_was_packed(kind: AeadKind) -> None:
    packed = Packed(kind)
    assert packed.open() is None
    assert torch.equal(packed.data, plain_data())


def test_a_sealed_chunk_shows_nothing_of_the_cache_on_the_link() -> None:
    """Not one of its 2,560 words of 4 bytes is where it was; by chance one in 2^32 would be."""
    encrypted, plain = Packed().data.view(torch.int32), plain_data().view(torch.int32)
    assert not bool((encrypted == plain).any())


@pytest.mark.parametrize("position", [HEADER_BYTES, HEADER_BYTES + 1000, -17, -16, -1])
def test_one_flipped_bit_is_seen(position: int) -> None:
    packed = Packed()
    packed.buffer[: packed.chunk.num_bytes][position] ^= 4
    assert packed.open() == NOT_ENCRYPTED


def test_a_flipped_bit_passes_when_there_is_no_seal() -> None:
    packed = Packed(AeadKind.NONE)
    packed.buffer[HEADER_BYTES] ^= 4
    assert packed.open() is None


def test_a_chunk_of_another_session_is_refused() -> None:
    packed = Packed()
    packed.codec = ChunkCodec(kv_packer(packed.kv), Aead(AeadKind.AES_GCM, bytes(KEY_BYTES)))
    assert packed.open() == NOT_ENCRYPTED


def test_a_chunk_that_comes_again_is_refused() -> None:
    """The same bytes under the same announcement: another message of the link all the same."""
    packed = Packed()
    again = packed.buffer.clone()
    assert packed.open() is None
    packed.buffer = again
    assert packed.open() == NOT_ENCRYPTED


def test_layers_that_are_swapped_under_each_others_headers_are_refused() -> None:
    packed, other = Packed(), Packed()
    rows = kv_packer(other.kv)
    swapped = Chunk(0, 2, 4, 0, 20, other.chunk.num_bytes)
    ChunkCodec(rows, Aead(AeadKind.AES_GCM, KEY)).pack(TRANSFER, swapped, TABLE, other.buffer)
    assert not torch.equal(other.data, packed.data)
    packed.data.copy_(other.data)
    packed.buffer[packed.chunk.num_bytes - 16 : packed.chunk.num_bytes] = other.buffer[
        packed.chunk.num_bytes - 16 : packed.chunk.num_bytes
    ]
    assert packed.open() == NOT_ENCRYPTED


def test_a_chunk_under_another_kind_of_seal_is_refused() -> None:
    packed = Packed(AeadKind.NONE)
    packed.codec = ChunkCodec(kv_packer(packed.kv), Aead(AeadKind.AES_GCM, KEY))
    assert packed.open() == "chunk 0: expected flags 1, got 0"


def test_a_shorter_message_is_seen_by_the_seal() -> None:
    """Gloo reports success and leaves the tail as it was."""
    packed = Packed()
    packed.buffer[packed.chunk.num_bytes - 2048 : packed.chunk.num_bytes] = 0
    assert packed.open() == NOT_ENCRYPTED


@pytest.mark.parametrize("kind", AeadKind)
def test_a_longer_message_is_seen_by_what_it_overwrites(kind: AeadKind) -> None:
    packed = Packed(kind)
    packed.buffer[packed.chunk.num_bytes : packed.chunk.num_bytes + 100] = 1
    assert packed.open() == f"chunk 0: expected {packed.chunk.num_bytes} bytes, more came"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seq": 1}, "seq 1, got 0"),
        ({"layer_start": 1, "layer_end": 3}, "layer_start 1, got 0, layer_end 3, got 2"),
        ({"token_start": 20, "token_end": 40}, "token_start 20, got 0, token_end 40, got 20"),
    ],
)
def test_a_chunk_in_the_place_of_another_is_seen_by_its_header(change: dict[str, int], name: str) -> None:
    """Order alone decides what a message is (NCCL ignores tags), so each one says what it is."""
    packed = Packed()
    fields = {slot: getattr(packed.chunk, slot) for slot in packed.chunk.__slots__} | change
    problem = packed.open(Chunk(**fields))
    assert problem is not None
    assert name in problem


@pytest.mark.parametrize("other", [new_transfer_id("r2"), new_transfer_id("r1", prefill_try=1)], ids=str)
def test_a_chunk_of_another_transfer_or_try_is_seen(other: TransferId) -> None:
    problem = Packed().open(transfer_id=other)
    assert problem is not None
    assert "transfer" in problem


@pytest.mark.parametrize("kind", AeadKind)
@pytest.mark.parametrize("offset", range(HEADER_BYTES - 4))
def test_every_byte_of_the_header_counts(offset: int, kind: AeadKind) -> None:
    packed = Packed(kind)
    packed.buffer[offset] ^= 1
    assert packed.open() is not None


def test_a_payload_of_the_wrong_length_is_not_sealed() -> None:
    packed = Packed()
    view = packed.buffer.numpy().data
    with pytest.raises(ValueError, match="expected"):
        payload.encrypt(view[: packed.chunk.num_bytes + 1], TRANSFER, packed.chunk, plaintext())


def test_staging_buffers_are_reused_within_the_bound_and_counted() -> None:
    pool = StagingPool(max_kept_bytes=300 << 10, device=torch.device("cpu"), is_pinned=False)
    buffers = [pool.acquire(100_000) for _ in range(4)]
    assert pool.num_out == 4
    assert all(buffer.numel() >= 100_000 + 100_000 // 8 for buffer in buffers)
    addresses = {buffer.data_ptr() for buffer in buffers}
    for buffer in buffers:
        pool.release(buffer)
    assert (pool.num_out, pool.kept_bytes) == (0, 2 * (128 << 10))
    assert pool.acquire(90_000).data_ptr() in addresses
    pool.forget()
    assert pool.num_out == 0
