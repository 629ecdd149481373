"""A decoder-only model: embedding, layers, final norm, head. What a layer computes is a value, see `LayerSpec`."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from common.checkpoint import ModelSpec
from common.checkpoint.families import family_of, layers_of
from common.engine.contract.attention import AttentionBatch, LayerKV
from common.engine.contract.collectives import Collectives
from common.engine.contract.device import Device, ExpertMlp, Layer, Tail
from common.engine.contract.executor import LayerHook
from common.engine.model.adapters import RowAdapters
from common.engine.model.layers import attend, finish, read_layer, write_kv
from common.engine.model.parallel import gathered
from common.engine.model.rope import cos_sin_table
from common.engine.model.sharding import EMBEDDING, HEAD, layer_of_rank, vocabulary_of_rank
from common.engine.model.weights import Weights
from common.values.ranks import WHOLE

HEAD_BITS = 8  # logits are no place to save bits


class Decoder:
    """Immutable once built. One step at a time: the device may keep state of a step.

    Runs of layers that the device compiles are one call each; the layers between them go operator by operator.
    """

    def __init__(
        self,
        embedding: torch.Tensor,  # [vocab_size, hidden_size]
        layers: Sequence[Layer],
        tail: Tail,
        device: Device,
        embedding_scale: float = 1.0,
    ) -> None:
        self._embedding = embedding
        # transformers rounds the factor to the weights' type, too
        self._embedding_scale = torch.tensor(embedding_scale, dtype=embedding.dtype).item()
        self._layers = layers
        self._tail = tail
        self._device = device
        self._compiled = device.compile(layers, tail)

    @property
    def compiled_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that are computed in compiled calls, over a cache that those know."""
        return tuple(first + idx for first, run in self._compiled.items() for idx in range(run.num_layers))

    @property
    def is_recordable(self) -> bool:
        """Whether a step does the same whatever its tokens are, so that a recording of it can be replayed."""
        mixtures = (layer.mlp for layer in self._layers if isinstance(layer.mlp, ExpertMlp))
        return all(mixture.experts.is_recordable for mixture in mixtures)

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        batches: Sequence[AttentionBatch],  # per layer: layers of a group have the same
        kv: Sequence[LayerKV],  # per layer
        logit_rows: torch.Tensor,  # [num_rows] int64, ascending: the tokens whose logits are wanted
        layer_hook: LayerHook | None = None,
        adapters: RowAdapters | None = None,  # of all tokens
    ) -> torch.Tensor:
        """Logits [num_rows, vocab_size] float32. Writes KV of every token; `layer_hook(n)` follows layer n - 1's.

        In the last layer only the wanted rows are computed past attention, and nothing when none is wanted. With
        adapters every layer goes operator by operator.
        """
        hidden = F.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        done = 0
        while done < len(self._layers):
            run = self._compiled.get(done) if adapters is None else None
            run = run if run is not None and run.can_run(kv[done]) else None
            after = done + (run.num_layers if run is not None else 1)
            rows = logit_rows if after == len(self._layers) else None
            hook = _from(done, layer_hook)
            if run is None:
                hidden = self._layer(done, hidden, batches[done], kv[done], rows, hook, adapters)
            else:
                assert all(batch is batches[done] for batch in batches[done:after]), "layers of two groups in a run"
                hidden = run.forward(hidden, batches[done], kv[done:after], rows, hook)
                if run.has_tail:
                    return hidden
            done = after
        return self._logits(hidden)

    def _layer(
        self,
        idx: int,
        hidden: torch.Tensor,
        batch: AttentionBatch,
        kv: LayerKV,
        rows: torch.Tensor | None,
        layer_hook: LayerHook | None,
        adapters: RowAdapters | None,
    ) -> torch.Tensor:
        layer = self._layers[idx] if adapters is None else adapters.changed(idx, self._layers[idx])
        q = write_kv(layer, self._device, hidden, kv, batch)
        if layer_hook is not None:
            layer_hook(1)
        if rows is not None and rows.numel() == 0:
            return hidden[:0]
        attended = attend(layer, self._device, q, kv, batch)
        if rows is not None:
            attended, hidden = attended[rows], hidden[rows]
            layer = self._layers[idx] if adapters is None else adapters.at(rows).changed(idx, self._layers[idx])
        return finish(layer, self._device, attended, hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        tail = self._tail
        if hidden.shape[0] == 0:
            return hidden.new_empty((0, tail.head.out_features), dtype=torch.float32)
        logits = tail.head(self._device.elementwise.rms_norm(hidden, tail.norm, tail.norm_eps)).float()
        if tail.logit_scale != 1:
            logits.mul_(tail.logit_scale)
        if cap := tail.logit_soft_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def _from(first: int, layer_hook: LayerHook | None) -> LayerHook | None:
    """The hook of the whole model for layers that are counted from `first` on."""
    if layer_hook is None or first == 0:
        return layer_hook
    hook = layer_hook
    return lambda num_layers: hook(first + num_layers)


def build_decoder(spec: ModelSpec, weights: Weights, device: Device, collectives: Collectives | None = None) -> Decoder:
    """Read all weights and prepare them for `device`. Raises CheckpointError on a missing or unused weight.

    With `collectives` it is that rank's part of the model, of weights that were opened with its cuts; rank 0 alone gets
    logits of the whole vocabulary.
    """
    rank = collectives.rank if collectives is not None else WHOLE
    names, specs = family_of(spec).names, [layer_of_rank(layer, rank) for layer in layers_of(spec)]
    ropes = {(layer.rope, layer.head_dim) for layer in specs}
    tables = {rope: cos_sin_table(*rope, spec.max_position, device.place) for rope in ropes}
    embedding = weights.take(EMBEDDING, (spec.vocab_size, spec.hidden_size))
    layers = [
        read_layer(
            layer, tables[layer.rope, layer.head_dim], weights, f"model.layers.{idx}", names, device, collectives
        )
        for idx, layer in enumerate(specs)
    ]
    norm = weights.take("model.norm.weight", (spec.hidden_size,))
    rows = vocabulary_of_rank(spec, rank)
    tied = embedding[rows.start : rows.stop]
    head = tied if spec.tie_embeddings else weights.take(HEAD, (rows.size, spec.hidden_size))
    weights.check_all_taken()
    product = gathered(device.linear(head, min_bits=HEAD_BITS), spec, collectives)
    tail = Tail(norm, spec.rms_norm_eps, product, spec.logit_scale, spec.logit_soft_cap)
    return Decoder(embedding, layers, tail, device, spec.embedding_scale)
