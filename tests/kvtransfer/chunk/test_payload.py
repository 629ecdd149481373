"""A chunk's bytes: header, encryption, and every planted fault that must be seen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from tests.interpreter import import_triton_interpreted

import_triton_interpreted()

from common.engine.contract.kv_spec import KVGroup, KVSpec, Plane  # noqa: E402
from common.engine.devices.triton.chunk import gather_rows, scatter_rows  # noqa: E402
from common.engine.kv.attention_planes import read_rows, write_rows  # noqa: E402
from common.engine.kv.cache import KVCache  # noqa: E402
from common.engine.kv.quantized import dequantize, quantize  # noqa: E402
from common.values.ids import TransferId  # noqa: E402
from kvtransfer.chunk.aead import KEY_BYTES, Aead, AeadKind  # noqa: E402
from kvtransfer.chunk.codec import HEADER_BYTES, ChunkCodec, data_range  # noqa: E402
from kvtransfer.chunk.pack import DeviceKVPacker, KVPacker, NumpyKVPacker, kv_packer  # noqa: E402
from kvtransfer.chunk.plan import FRAME_BYTES, ChunkPlanner  # noqa: E402
from kvtransfer.chunk.staging import StagingPool  # noqa: E402
from kvtransfer.events import Chunk  # noqa: E402
from tests.caches import attention_spec, fill, planes_of  # noqa: E402
from tests.kvtransfer.cluster import new_cache, new_transfer_id, put_rows, request_rows, rows_of  # noqa: E402

KEY = bytes(range(KEY_BYTES))
TRANSFER, TABLE = new_transfer_id("r1"), (3, 4)
NOT_ENCRYPTED = "chunk 0: not what the peer encrypted for this place on the link"


def chunk_of(kv: KVCache, layers: tuple[int, int], tokens: tuple[int, int], seq: int = 0, group_idx: int = 0) -> Chunk:
    """All shards."""
    num_bytes = ChunkPlanner(kv.spec, 1).num_bytes(group_idx, layers[1] - layers[0], tokens[1] - tokens[0])
    return Chunk(seq, *layers, *tokens, num_bytes, group_idx, 0, kv.spec.groups[group_idx].num_shards)


def by_kernels(kv: KVCache) -> KVPacker:
    """As on a GPU, under triton's interpreter."""
    return DeviceKVPacker(kv, gather_rows, scatter_rows)


@pytest.mark.parametrize("packer_of", [NumpyKVPacker, by_kernels])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_sizes", [(16, 32), (32, 16), (16, 16), (8, 64)])
@pytest.mark.parametrize("tokens", [(0, 1), (0, 16), (15, 17), (5, 100), (31, 33), (96, 100)])
def test_a_chunk_survives_the_way_between_block_sizes(
    packer_of: Callable[[KVCache], KVPacker],
    dtype: torch.dtype,
    block_sizes: tuple[int, int],
    tokens: tuple[int, int],
) -> None:
    source, target = (new_cache(size, dtype=dtype) for size in block_sizes)
    rows = request_rows(1, 100).to(dtype)
    source_table = tuple(range(100 // block_sizes[0], -1, -1))
    target_table = tuple(range(1, 100 // block_sizes[1] + 2))
    for layer in range(4):
        put_rows(source, source_table, layer, 0, rows[layer])
    chunk = chunk_of(source, (1, 3), tokens)
    data = torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    packer_of(source).gather(chunk, source_table, data)
    packer_of(target).scatter(chunk, target_table, data)
    expected = torch.zeros_like(rows)
    expected[1:3, :, tokens[0] : tokens[1]] = rows[1:3, :, tokens[0] : tokens[1]]
    assert torch.equal(rows_of(target, target_table, 100), expected)
    assert sum(int(plane.count_nonzero()) for plane in planes_of(target)) == int(expected.count_nonzero())


@pytest.mark.parametrize("packer_of", [NumpyKVPacker, by_kernels])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_rows_travel_with_their_scales(packer_of: Callable[[KVCache], KVPacker], kind: torch.dtype) -> None:
    source, target = (
        KVCache(attention_spec(3, 3, 64, kind, block_size), (num_blocks,))
        for block_size, num_blocks in ((16, 4), (32, 3))
    )
    chunk = chunk_of(source, (1, 3), (5, 40))
    assert chunk.num_bytes - FRAME_BYTES == 35 * source.spec.bytes_per_token * 2 // 3
    k, v = torch.randn(2, 35, 3, 64, generator=torch.Generator().manual_seed(0))
    at_source = torch.tensor([(3, 0, 2)[p // 16] * 16 + p % 16 for p in range(5, 40)])
    at_target = torch.tensor([(2, 1)[p // 32] * 32 + p % 32 for p in range(5, 40)])
    write_rows(source.layers[2], at_source, k, v)
    data = torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    packer_of(source).gather(chunk, (3, 0, 2), data)
    packer_of(target).scatter(chunk, (2, 1), data)
    got = read_rows(target.layers[2], at_target, torch.float32)
    for rows, expected in zip(got, (k, v), strict=True):
        torch.testing.assert_close(rows, expected, rtol=1 / 15, atol=0.02)
        assert torch.equal(rows, dequantize(*quantize(expected, kind)))


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
    kv.fence = LoggingFence()
    packer = DeviceKVPacker(kv, copy("gather"), copy("scatter"))
    chunk = chunk_of(kv, (1, 3), (0, 5))
    data = torch.zeros(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    packer.gather(chunk, (0,), data)
    packer.scatter(chunk, (0,), data)
    assert log == [3, "gather", "gather", "all", "scatter", "scatter"]


def test_rows_of_an_odd_number_of_bytes_are_copied() -> None:
    source, target = (
        KVCache(KVSpec(block_size, (KVGroup((0, 1), (Plane("row", (3,), "int8"),)),)), (num_blocks,))
        for block_size, num_blocks in ((4, 4), (8, 2))
    )
    source.planes[0][0].copy_(torch.arange(2 * 4 * 4 * 3).view(2, 4, 4, 3))
    chunk = chunk_of(source, (0, 2), (0, 7))
    data = torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    NumpyKVPacker(source).gather(chunk, (3, 0), data)
    NumpyKVPacker(target).scatter(chunk, (1,), data)
    assert torch.equal(rows_of(target, (1,), 7), rows_of(source, (3, 0), 7))


@pytest.mark.parametrize("packer_of", [NumpyKVPacker, by_kernels])
def test_a_chunk_of_some_shards_moves_those_heads_alone(packer_of: Callable[[KVCache], KVPacker]) -> None:
    source, target = new_cache(16), new_cache(32)
    rows = request_rows(1, 20)
    for layer in range(4):
        put_rows(source, (2, 0), layer, 0, rows[layer])
    whole = chunk_of(source, (0, 4), (0, 20))
    half = replace(whole, shard_start=1, num_bytes=FRAME_BYTES + (whole.num_bytes - FRAME_BYTES) // 2)
    data = torch.empty(half.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    packer_of(source).gather(half, (2, 0), data)
    packer_of(target).scatter(half, (1,), data)
    found = rows_of(target, (1,), 20)
    assert torch.equal(found[..., 1, :], rows[..., 1, :])
    assert not found[..., 0, :].any()


@pytest.mark.parametrize("packer_of", [NumpyKVPacker, by_kernels])
def test_a_chunk_is_packed_from_the_layers_and_blocks_of_its_group(packer_of: Callable[[KVCache], KVPacker]) -> None:
    row = Plane("row", (4,), "float32")
    spec = KVSpec(4, (KVGroup((0, 2), (row,)), KVGroup((1,), (row,), window=6)))
    source, target = KVCache(spec, (2, 5)), KVCache(spec, (2, 3))
    for cache in (source, target):
        fill(cache, 0.0)
    source.planes[1][0][0, 4] = torch.arange(16.0).view(4, 4)
    chunk = chunk_of(source, (0, 1), (5, 8), group_idx=1)
    data = torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8)
    packer_of(source).gather(chunk, (-1, 4), data)
    packer_of(target).scatter(chunk, (-1, 2), data)
    assert torch.equal(target.planes[1][0][0, 2, 1:], source.planes[1][0][0, 4, 1:])
    assert int(target.planes[1][0].count_nonzero()) == 12
    assert not target.planes[0][0].any()


@pytest.mark.parametrize("block_table", [(0,), (0, 64), (0, -1)])
def test_a_block_table_that_does_not_fit_is_a_bug(block_table: tuple[int, ...]) -> None:
    kv = new_cache(16)
    chunk = chunk_of(kv, (0, 1), (0, 20))
    with pytest.raises(AssertionError, match="block table"):
        NumpyKVPacker(kv).gather(chunk, block_table, torch.empty(chunk.num_bytes - FRAME_BYTES, dtype=torch.uint8))


class Packed:
    """A chunk packed by a sender, in a buffer as a receiver would have it. Decrypted once, like every message."""

    def __init__(self, kind: AeadKind = AeadKind.AES_GCM, seq: int = 0) -> None:
        self.kv = new_cache(16)
        generator = torch.Generator().manual_seed(1)
        for plane in planes_of(self.kv):
            plane.copy_(torch.randn(plane.shape, generator=generator))
        rows: KVPacker = kv_packer(self.kv)
        self.chunk = chunk_of(self.kv, (0, 2), (0, 20), seq)
        self.pool = StagingPool(1 << 20, torch.device("cpu"), is_pinned=False)
        self.codec = ChunkCodec(rows, Aead(kind, KEY))
        self.buffer = self.pool.acquire(self.chunk.num_bytes)
        self.codec.prepare(self.chunk, self.buffer)
        packed = self.pool.acquire(self.chunk.num_bytes)
        ChunkCodec(rows, Aead(kind, KEY)).pack(TRANSFER, self.chunk, TABLE, packed)
        self.buffer[: self.chunk.num_bytes] = packed[: self.chunk.num_bytes]

    def decrypt(self, chunk: Chunk | None = None, transfer_id: TransferId = TRANSFER) -> str | None:
        return self.codec.decrypt(transfer_id, chunk or self.chunk, self.buffer)

    @property
    def data(self) -> torch.Tensor:
        return self.buffer[data_range(self.chunk)]


def plain_data() -> torch.Tensor:
    return Packed(AeadKind.NONE).data


@pytest.mark.parametrize("kind", AeadKind)
def test_an_intact_chunk_is_decrypted_to_what_was_packed(kind: AeadKind) -> None:
    packed = Packed(kind)
    assert packed.decrypt() is None
    assert torch.equal(packed.data, plain_data())


def test_a_sealed_chunk_shows_nothing_of_the_cache_on_the_link() -> None:
    """Not one of its 2,560 words of 4 bytes is where it was; by chance one in 2^32 would be."""
    encrypted, plain = Packed().data.view(torch.int32), plain_data().view(torch.int32)
    assert not bool((encrypted == plain).any())


@pytest.mark.parametrize("position", [HEADER_BYTES, HEADER_BYTES + 1000, -17, -16, -1])
def test_one_flipped_bit_is_seen(position: int) -> None:
    packed = Packed()
    packed.buffer[: packed.chunk.num_bytes][position] ^= 4
    assert packed.decrypt() == NOT_ENCRYPTED


def test_a_flipped_bit_passes_when_there_is_no_seal() -> None:
    packed = Packed(AeadKind.NONE)
    packed.buffer[HEADER_BYTES] ^= 4
    assert packed.decrypt() is None


def test_a_chunk_of_another_session_is_refused() -> None:
    packed = Packed()
    packed.codec = ChunkCodec(kv_packer(packed.kv), Aead(AeadKind.AES_GCM, bytes(KEY_BYTES)))
    assert packed.decrypt() == NOT_ENCRYPTED


def test_a_chunk_that_comes_again_is_refused() -> None:
    """The same bytes under the same announcement: another message of the link all the same."""
    packed = Packed()
    again = packed.buffer.clone()
    assert packed.decrypt() is None
    packed.buffer = again
    assert packed.decrypt() == NOT_ENCRYPTED


def test_layers_that_are_swapped_under_each_others_headers_are_refused() -> None:
    packed, other = Packed(), Packed()
    rows = kv_packer(other.kv)
    swapped = chunk_of(other.kv, (2, 4), (0, 20))
    ChunkCodec(rows, Aead(AeadKind.AES_GCM, KEY)).pack(TRANSFER, swapped, TABLE, other.buffer)
    assert not torch.equal(other.data, packed.data)
    packed.data.copy_(other.data)
    packed.buffer[packed.chunk.num_bytes - 16 : packed.chunk.num_bytes] = other.buffer[
        packed.chunk.num_bytes - 16 : packed.chunk.num_bytes
    ]
    assert packed.decrypt() == NOT_ENCRYPTED


def test_a_chunk_under_another_kind_of_seal_is_refused() -> None:
    packed = Packed(AeadKind.NONE)
    packed.codec = ChunkCodec(kv_packer(packed.kv), Aead(AeadKind.AES_GCM, KEY))
    assert packed.decrypt() == "chunk 0: expected flags 1, got 0"


def test_a_shorter_message_is_seen_by_the_seal() -> None:
    """Gloo reports success and leaves the tail as it was."""
    packed = Packed()
    packed.buffer[packed.chunk.num_bytes - 2048 : packed.chunk.num_bytes] = 0
    assert packed.decrypt() == NOT_ENCRYPTED


@pytest.mark.parametrize("kind", AeadKind)
def test_a_longer_message_is_seen_by_what_it_overwrites(kind: AeadKind) -> None:
    packed = Packed(kind)
    packed.buffer[packed.chunk.num_bytes : packed.chunk.num_bytes + 100] = 1
    assert packed.decrypt() == f"chunk 0: expected {packed.chunk.num_bytes} bytes, more came"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seq": 1}, "seq 1, got 0"),
        ({"layer_start": 1, "layer_end": 3}, "layer_start 1, got 0, layer_end 3, got 2"),
        ({"token_start": 20, "token_end": 40}, "token_start 20, got 0, token_end 40, got 20"),
        ({"group_idx": 1}, "group_idx 1, got 0"),
        ({"shard_start": 1}, "shard_start 1, got 0"),
    ],
)
def test_a_chunk_in_the_place_of_another_is_seen_by_its_header(change: dict[str, int], name: str) -> None:
    """Order alone decides what a message is (NCCL ignores tags), so each one says what it is."""
    packed = Packed()
    fields = {slot: getattr(packed.chunk, slot) for slot in packed.chunk.__slots__} | change
    problem = packed.decrypt(Chunk(**fields))
    assert problem is not None
    assert name in problem


@pytest.mark.parametrize("other", [new_transfer_id("r2"), new_transfer_id("r1", prefill_try=1)], ids=str)
def test_a_chunk_of_another_transfer_or_try_is_seen(other: TransferId) -> None:
    problem = Packed().decrypt(transfer_id=other)
    assert problem is not None
    assert "transfer" in problem


@pytest.mark.parametrize("kind", AeadKind)
@pytest.mark.parametrize("offset", range(HEADER_BYTES - 2))
def test_every_byte_of_the_header_counts(offset: int, kind: AeadKind) -> None:
    packed = Packed(kind)
    packed.buffer[offset] ^= 1
    assert packed.decrypt() is not None


def test_data_of_another_length_than_the_chunks_are_a_bug() -> None:
    packed = Packed()
    longer = replace(packed.chunk, num_bytes=packed.chunk.num_bytes + 8)
    with pytest.raises(AssertionError, match="bytes of data"):
        packed.codec.pack(TRANSFER, longer, TABLE, packed.buffer)


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


class OnDevice(torch.Tensor):
    """A buffer that says it is on a GPU, and notes when it is copied to or from."""

    is_cuda = True
    is_beside_compute = False
    copies: ClassVar[list[bool]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("copy_", "cpu"):
            cls.copies.append(cls.is_beside_compute)
        return super().__torch_function__(func, types, args, kwargs or {})


class Beside(NumpyKVPacker):
    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        OnDevice.is_beside_compute = True
        yield
        OnDevice.is_beside_compute = False


def test_a_header_on_a_gpu_is_written_and_read_beside_what_is_computed() -> None:
    """On the stream of the step a chunk would leave when the whole step has ended, and be checked between two."""
    kv = new_cache(16)
    chunk, codec = chunk_of(kv, (0, 1), (0, 20)), ChunkCodec(Beside(kv), Aead(AeadKind.NONE, b""))
    buffer = torch.zeros(chunk.num_bytes + 64, dtype=torch.uint8).as_subclass(OnDevice)
    OnDevice.copies.clear()
    codec.pack(TRANSFER, chunk, TABLE, buffer)
    codec.decrypt(TRANSFER, chunk, buffer)
    assert OnDevice.copies == [True, True]
