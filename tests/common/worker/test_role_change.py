"""Which settings a worker may change with its role, and which it must be loaded anew for."""

import pytest

from common.values.config import ModelConfig, WorkerConfig
from common.worker.role_change import MAY_DIFFER, OF_THE_PLACE, RoleChangeRefused, at_the_place_of, check_role_change

PREFILL = WorkerConfig(role="prefill", worker_id="prefill-0", model=ModelConfig(path="m"), redis_url="redis://a")
DECODE = PREFILL.model_copy(update={"role": "decode", "worker_id": "decode-0"})


def test_sizes_and_paces_may_differ() -> None:
    sizes = {"block_size": 32, "num_blocks": 9, "num_threads": 3, "max_num_seqs": 2, "port": 5, "lease_s": 1.0}
    check_role_change(PREFILL, DECODE.model_copy(update=sizes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"),
        ("attention", "triton"),
        ("model", ModelConfig(path="other")),
        ("model", ModelConfig(path="m", max_model_len=9)),
        ("namespace", "other"),
    ],
)
def test_what_the_weights_or_the_cluster_depend_on_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RoleChangeRefused, match=f"^{name}: .* as prefill, .* as decode$"):
        check_role_change(PREFILL, DECODE.model_copy(update={name: value}))


def test_a_password_is_not_told() -> None:
    """As where workers outlived a controller, and the next one was given another password."""
    with pytest.raises(RoleChangeRefused, match=r"^redis_url: one as prefill, another as decode$"):
        check_role_change(PREFILL, DECODE.model_copy(update={"redis_url": "redis://:secret@a"}))


def test_every_setting_that_may_differ_exists() -> None:
    assert set(WorkerConfig.model_fields) >= MAY_DIFFER | OF_THE_PLACE


def test_what_belongs_to_the_place_stays() -> None:
    here = PREFILL.model_copy(update={"num_threads": 3, "host": "10.0.0.1", "metrics_port": 9400})
    there = DECODE.model_copy(update={"num_threads": 8, "host": "127.0.0.1", "metrics_port": 9401, "port": 7})
    check_role_change(here, there)
    fitted = at_the_place_of(here, there)
    assert (fitted.num_threads, fitted.host, fitted.metrics_port) == (3, "10.0.0.1", 9400)
    assert (fitted.role, fitted.port) == ("decode", 7)
