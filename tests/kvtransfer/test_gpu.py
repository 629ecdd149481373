"""What needs a GPU: copies on a side stream, pinned staging, and NCCL between two GPUs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvtransfer.chunk.aead import KEY_BYTES, Aead, AeadKind
from kvtransfer.chunk.codec import ChunkCodec
from kvtransfer.chunk.pack import kv_packer
from kvtransfer.links.nccl import build_nccl_link
from kvtransfer.links.rendezvous import RendezvousStore, join_rendezvous
from kvtransfer.session import SessionSettings
from tests.kvtransfer.chunk.test_payload import chunk_of
from tests.kvtransfer.cluster import FINGERPRINT, PREFILL, new_cache, new_transfer_id, put_rows, request_rows, rows_of
from tests.kvtransfer.links.link_tools import HOST, TIMEOUT_S, new_prefix, receive, send

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ranks on one GPU")


@needs_gpu
def test_a_chunk_goes_from_gpu_cache_to_gpu_cache_through_pinned_staging() -> None:
    source, target = new_cache(16, device="cuda"), new_cache(32, device="cuda")
    rows = request_rows(1, 100)
    for layer in range(4):
        put_rows(source, (5, 3, 9, 1, 7, 11, 2), layer, 0, rows[layer].cuda())
    buffer = SessionSettings(PREFILL, FINGERPRINT, source).new_staging_pool().acquire(200_000)
    assert buffer.is_pinned()
    chunk = chunk_of(source, (0, 4), (0, 100))
    sender, receiver = (ChunkCodec(kv_packer(kv), Aead(AeadKind.AES_GCM, bytes(KEY_BYTES))) for kv in (source, target))
    receiver.prepare(chunk, buffer)
    sender.pack(new_transfer_id("r1"), chunk, (5, 3, 9, 1, 7, 11, 2), buffer)
    assert receiver.decrypt(new_transfer_id("r1"), chunk, buffer) is None
    receiver.unpack(chunk, (4, 0, 6, 3), buffer)
    assert torch.equal(rows_of(target, (4, 0, 6, 3), 100).cpu(), rows)


@needs_two_gpus
def test_nccl_carries_messages_in_order_between_two_gpus() -> None:
    store, prefix = RendezvousStore(HOST, TIMEOUT_S), new_prefix()
    devices = [torch.device("cuda", index) for index in (0, 1)]

    def build(rank: int) -> object:
        torch.cuda.set_device(devices[rank])
        client = join_rendezvous(HOST, store.port, prefix, TIMEOUT_S)
        return build_nccl_link(client, rank, devices[rank], TIMEOUT_S, "nccl")

    with ThreadPoolExecutor(2) as executor:
        receiver, sender = executor.map(build, (0, 1))
    buffers = [torch.zeros(1 << 20, dtype=torch.uint8, device=devices[0]) for _ in range(8)]
    received = [receive(receiver, buffer) for buffer in buffers]
    for value in range(8):
        send(sender, torch.full((1 << 20,), value, dtype=torch.uint8, device=devices[1]))
    for value, (future, buffer) in enumerate(zip(received, buffers, strict=True)):
        future.result(TIMEOUT_S)
        assert bool((buffer == value).all())
    for end in (receiver, sender):
        end.close()
        assert end.join(TIMEOUT_S)
    store.close()
