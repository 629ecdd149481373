"""The encryption: its standard's own vectors, what is decrypted, and above all what is not."""

from dataclasses import replace

import pytest
import torch

from common.engine.kv.cache import KVCache
from common.values.ids import WorkerRef
from common.values.request import Fingerprint
from kvtransfer.chunk.aead import KEY_BYTES, TAG_BYTES, Aead, AeadKind
from kvtransfer.session import SessionSettings
from tests.caches import attention_spec

KEY = bytes(range(KEY_BYTES))
HEADER = b"layers 3 to 4, chunk 7"


def encrypted(aead: Aead, text: bytes = b"K and V", header: bytes = HEADER) -> bytearray:
    body = bytearray(text + bytes(TAG_BYTES))
    aead.encrypt(memoryview(header), memoryview(body))
    return body


def is_decrypted(aead: Aead, body: bytes, header: bytes = HEADER) -> bool:
    return aead.decrypt(memoryview(header), memoryview(bytearray(body)))


def new_aead(key: bytes = KEY) -> Aead:
    return Aead(AeadKind.AES_GCM, key)


def test_it_is_aes_gcm_as_published() -> None:
    """The GCM specification's test case 2: key, nonce and the one block of text are zeros."""
    body = encrypted(new_aead(bytes(16)), bytes(16), header=b"")
    assert body.hex() == "0388dace60b6a392f328c2b971b2fe78" + "ab6e47d42cec13bdf53a67b21257bddf"


def test_messages_open_in_the_order_of_the_link_and_carry_no_plain_text() -> None:
    sender, receiver = new_aead(), new_aead()
    for text in (b"first" * 9, b"second", b"first" * 9, b"x" * 100_000):
        body = encrypted(sender, text)
        assert text not in body
        assert receiver.decrypt(memoryview(HEADER), memoryview(body))
        assert body[:-TAG_BYTES] == text


def test_no_two_messages_share_a_nonce_whatever_is_sent_again() -> None:
    """With one nonce, two equal messages would be equal on the link."""
    sender = new_aead()
    assert len({bytes(encrypted(sender)) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("position", [0, 6, 7, 7 + TAG_BYTES - 1])
def test_a_flipped_bit_does_not_open(position: int) -> None:
    body = encrypted(new_aead())
    body[position] ^= 1
    assert not is_decrypted(new_aead(), body)


def test_another_header_does_not_open() -> None:
    assert not is_decrypted(new_aead(), encrypted(new_aead()), b"layers 4 to 5, chunk 7")


def test_a_message_that_is_cut_does_not_open() -> None:
    assert not is_decrypted(new_aead(), encrypted(new_aead(), bytes(64))[:-1])


def test_another_sessions_message_does_not_open() -> None:
    assert not is_decrypted(new_aead(), encrypted(new_aead(bytes(KEY_BYTES))))


def test_a_message_that_comes_again_or_too_early_does_not_open_and_the_next_one_does() -> None:
    sender, receiver = new_aead(), new_aead()
    messages = [encrypted(sender) for _ in range(4)]
    assert [is_decrypted(receiver, messages[at]) for at in (0, 0, 3, 3)] == [True, False, False, True]


def test_without_a_seal_nothing_is_changed_and_everything_opens() -> None:
    body = encrypted(Aead(AeadKind.NONE, b""))
    assert body == b"K and V" + bytes(TAG_BYTES)
    assert is_decrypted(Aead(AeadKind.NONE, b""), b"anything at all", b"")


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a key of 16 bytes, got 0"):
        Aead(AeadKind.AES_GCM, b"")


def test_the_setting_and_the_transport_say_whether_a_session_is_sealed() -> None:
    settings = SessionSettings(
        WorkerRef("p0", "a"), Fingerprint(), KVCache(attention_spec(1, 1, 1, torch.float32), (1,))
    )
    assert settings.aead_kind is AeadKind.AES_GCM
    assert replace(settings, digest=False).aead_kind is AeadKind.NONE
    on_device = replace(settings, cache=KVCache(settings.cache.spec, (1,), "meta"), transport="nccl")
    assert on_device.aead_kind is AeadKind.NONE
