from dataclasses import replace

import pytest
import torch

from common.ids import WorkerRef
from common.request import PairingInfo
from common.tls.identity import Component, Identity
from kvtransfer.digest import DIGEST_BYTES, Digest, DigestKind
from kvtransfer.sender_peer import _digest_kind
from kvtransfer.session import SessionEnded, SessionSettings

KEY = bytes(range(32))


class _Certified(Identity):
    @property
    def has_certificate(self) -> bool:
        return True


def test_the_digest_is_secret_where_its_key_travels_in_secret() -> None:
    plain = SessionSettings(WorkerRef("p0", "a"), PairingInfo(), torch.zeros(1))
    secure = replace(plain, identity=_Certified(Component.PREFILL, "ns"))
    assert plain.digest_kind is DigestKind.CRC32
    assert secure.digest_kind is DigestKind.HMAC
    assert replace(secure, digest=False).digest_kind is DigestKind.NONE


def test_the_digests_are_what_they_are_called() -> None:
    """RFC 4231, test case 2; CRC-32 of the key and then the data, as one text."""
    data = memoryview(b"what do ya want for nothing?")
    assert Digest(DigestKind.HMAC, b"Jefe").of(data).hex() == "5bdcc146bf60754e6a042426089575c7"
    assert Digest(DigestKind.CRC32, b"1234").of(memoryview(b"56789")) == 0xCBF43926.to_bytes(DIGEST_BYTES, "little")
    assert Digest().of(data) == bytes(DIGEST_BYTES)


def test_a_kind_that_is_not_known_ends_the_session() -> None:
    assert _digest_kind("crc32") is DigestKind.CRC32
    with pytest.raises(SessionEnded, match="'md5' is not known"):
        _digest_kind("md5")
