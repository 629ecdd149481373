"""The experts of a layer with packed weights, see `experts.h`. Owns the layout of what is passed to it."""

import ctypes
from collections.abc import Sequence

import torch

from common.checkpoint.layers import Experts
from common.engine.contract.device import ExpertMlp, Linear, Mlp
from common.engine.devices.cpu.native.products import ProductStruct
from common.engine.devices.cpu.native.signature import function


class ExpertsStruct(ctypes.Structure):
    """`Experts` of experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("num_experts", "num_active", "hidden_size", "size")),
        *((name, ProductStruct) for name in ("router", "shared_gate_up", "shared_down", "shared_weight")),
        *((name, ctypes.c_int64) for name in ("is_sigmoid", "is_normalized")),
        ("scale", ctypes.c_float),
    )


class NativeExperts:
    """`GroupedMlp.apply`. Immutable; keeps alive what its structures point to."""

    def __init__(self, library: ctypes.CDLL, spec: Experts, mlps: Sequence[Mlp]) -> None:
        """Every product of `mlps` is packed, all in the same bits."""
        self._run = function(library, "pdserve_run_experts", "ppipppb")
        self._spec = spec
        self._mlps = mlps
        count = len(mlps)
        self._gate_up = (ProductStruct * count)(*(mlp.gate_up.packed.struct for mlp in mlps))
        self._down = (ProductStruct * count)(*(mlp.down.packed.struct for mlp in mlps))
        self._struct = self._layout()

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        rows, chosen, shares = x.contiguous(), expert_ids.contiguous(), expert_weights.float().contiguous()
        out = torch.empty_like(rows)
        pointers = (tensor.data_ptr() for tensor in (chosen, shares))
        experts = ctypes.addressof(self._struct)
        self._run(out.data_ptr(), rows.data_ptr(), rows.shape[0], *pointers, experts, torch.get_num_threads())
        return out

    def with_router(self, mlp: ExpertMlp) -> ExpertsStruct:
        """The same with the router and the MLP for all tokens, all of it packed. Valid as long as this is."""
        shared = (mlp.shared.gate_up, mlp.shared.down) if mlp.shared is not None else (None, None)
        return self._layout(mlp.router, *shared, mlp.shared_weight)

    def _layout(self, *others: Linear | None) -> ExpertsStruct:
        routing = self._spec.routing
        structs = [one.packed.struct if one is not None else ProductStruct() for one in others]
        return ExpertsStruct(
            ctypes.addressof(self._gate_up),
            ctypes.addressof(self._down),
            *(routing.num_experts, routing.num_active, self._mlps[0].gate_up.in_features, self._spec.intermediate_size),
            *structs,
            *(ProductStruct() for _ in range(4 - len(structs))),
            *(routing.scores == "sigmoid", routing.is_normalized, routing.scale),
        )


def is_packed(mlp: Mlp | ExpertMlp) -> bool:
    """Whether `stack.h` computes it whole."""
    if isinstance(mlp, Mlp):
        return mlp.gate_up.packed is not None and mlp.down.packed is not None
    has_shared = mlp.shared is None or is_packed(mlp.shared)
    has_weight = mlp.shared_weight is None or mlp.shared_weight.packed is not None
    has_experts = isinstance(mlp.experts.packed, NativeExperts) and mlp.router.packed is not None
    return has_experts and has_shared and has_weight
