"""The torch runner: turns a StepPlan into tensors, runs the model, samples. Owns the model and its KV cache."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from common.engine.contract.attention import AttentionBatch
from common.engine.contract.device import Device
from common.engine.contract.draws import DrawCandidates
from common.engine.contract.executor import LayerHook
from common.engine.contract.plan import SampleSpec, ScheduledSequence, SequenceResult, StepPlan, StepResult
from common.engine.executor.adapters import Adapters
from common.engine.executor.graphs import DecodeGraphs
from common.engine.kv.cache import KVCache
from common.engine.kv.fence import Fence
from common.engine.model.decoder import Decoder
from common.engine.sampling import SampleError, sample
from common.engine.sampling.guided import Allowed, GuidedRows
from common.engine.sampling.prompt_logprobs import prompt_logprobs
from common.guided.masks import GrammarFailed, Masks
from common.values.ranks import WHOLE, Rank
from common.values.request import PromptLogprobs, SampledToken


class ModelRunner:
    """`Runner` on torch. One step at a time, from one thread."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        device: Device,
        graphs: DecodeGraphs | None = None,  # None = every kernel is launched by itself
        rank: Rank = WHOLE,
        guided: GuidedRows | None = None,  # None = no plan has a grammar
        adapters: Adapters | None = None,  # None = no plan has an adapter
    ) -> None:
        self.rank = rank
        self._model = model
        self._cache = cache
        self._device = device
        self._graphs = graphs
        self._adapters = adapters
        self._guided = guided or GuidedRows(_no_masks)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record the steps that come most."""
        if self._graphs is not None:
            self._graphs.warm_up()

    @torch.inference_mode()
    def run(self, plan: StepPlan, layer_hook: LayerHook | None = None) -> StepResult:
        """Copy blocks, write KV of all scheduled tokens, sample where asked; rank 0 alone samples."""
        started_s = time.perf_counter()
        for idx in {group_idx for group_idx, _, _ in plan.block_copies}:
            self._cache.copy_blocks([(source, target) for at, source, target in plan.block_copies if at == idx], idx)
        results = self._forward_and_sample(plan.sequences, layer_hook) if plan.sequences else ()
        if self._cache.fence is not None:
            self._cache.fence.mark_step()
        return StepResult(plan.step_id, results, time.perf_counter() - started_s)

    def _forward_and_sample(
        self, sequences: Sequence[ScheduledSequence], layer_hook: LayerHook | None
    ) -> tuple[SequenceResult, ...]:
        spec = self._cache.spec
        attended = [part for seq in sequences for part in seq.attended]
        batches = build_batches(attended, len(spec.groups), spec.block_size, self._device.place)
        token_ids = self._int64([token_id for seq in sequences for token_id in seq.new_token_ids])
        starts = accumulate((seq.num_new for seq in sequences[:-1]), initial=0)
        rows = [start + row for seq, start in zip(sequences, starts, strict=True) for row in seq.logit_rows]
        sampled = [seq for seq in sequences if seq.samples and self.rank.rank == 0]
        specs = [spec for seq in sampled for spec in seq.samples]
        allowed = self._guided.start(specs)
        adapters = self._adapters.of_step(sequences) if self._adapters is not None else None
        has_all_rows = layer_hook is None and len(rows) == len(token_ids)
        if adapters is None and has_all_rows and self._graphs is not None and self._graphs.can_run(batches[0]):
            logits = self._graphs.run(token_ids, batches)
        else:
            hook = _marking(self._cache.fence, layer_hook) if self._cache.fence is not None else layer_hook
            by_layer = self._cache.by_layer(batches)
            logits = self._model.forward(token_ids, by_layer, self._cache.layers, self._int64(rows), hook, adapters)
        if self.rank.rank != 0:
            return ()
        scores, logits = _scored(sequences, logits)
        results = _sample(sampled, specs, logits, self._device.draws, allowed()) if sampled else ()
        return _with_scores(sequences, results, scores) if scores else results

    def _int64(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device.place)


def _no_masks() -> Masks:
    raise GrammarFailed("this model was opened without a tokenizer")


def _marking(fence: Fence, layer_hook: LayerHook | None) -> LayerHook:
    """The hook, after a mark: who is called finds the mark."""

    def mark_and_call(num_layers: int) -> None:
        fence.mark(num_layers)
        if layer_hook is not None:
            layer_hook(num_layers)

    return mark_and_call


def build_batches(
    sequences: Sequence[ScheduledSequence], num_groups: int, block_size: int, device: torch.device | str = "cpu"
) -> tuple[AttentionBatch, ...]:
    """Where every token of the step stands, for each group of layers. Raises ValueError when a table is too short."""
    lens = [seq.start + seq.num_new for seq in sequences]
    num_new = torch.tensor([seq.num_new for seq in sequences])
    cu_seqlens = torch.zeros(len(sequences) + 1, dtype=torch.int32)
    torch.cumsum(num_new, 0, out=cu_seqlens[1:])
    tables = _pad_tables(sequences, num_groups, lens, block_size)
    seq_of_token = torch.repeat_interleave(torch.arange(len(sequences)), num_new)
    starts = torch.tensor([seq.start for seq in sequences])
    positions = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[seq_of_token] + starts[seq_of_token]
    blocks = tables[:, seq_of_token, positions // block_size].long()
    slots = (blocks * block_size + positions % block_size).to(device)
    shared = {
        "positions": positions.to(device),
        "cu_seqlens_q": cu_seqlens.to(device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
    }
    max_query_len, max_seq_len, tables = int(num_new.max()), max(lens), tables.to(device)
    return tuple(
        AttentionBatch(
            **shared,
            slot_mapping=slots[idx],
            block_tables=tables[idx],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        for idx in range(num_groups)
    )


def _pad_tables(
    sequences: Sequence[ScheduledSequence], num_groups: int, lens: list[int], block_size: int
) -> torch.Tensor:
    """[num_groups, num_seqs, max_blocks] int32, cut to the blocks in use and padded with 0."""
    counts = [-(-length // block_size) for length in lens]
    width = max(counts)
    rows = [
        _pad_table(seq, idx, count, width)
        for idx in range(num_groups)
        for seq, count in zip(sequences, counts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32).view(num_groups, len(sequences), width)


def _pad_table(sequence: ScheduledSequence, group_idx: int, count: int, width: int) -> tuple[int, ...]:
    table = sequence.block_tables[group_idx]
    if len(table) < count:
        raise ValueError(f"sequence {sequence.sequence_id}: {len(table)} blocks, {count} needed")
    return table[:count] + (0,) * (width - count)


_Scores = Mapping[int, PromptLogprobs | SampleError]  # by sequence


def _scored(sequences: Sequence[ScheduledSequence], logits: torch.Tensor) -> tuple[_Scores, torch.Tensor]:
    """The scores of the sequences that want them, and the rows of logits that are left, to sample from."""
    scores: dict[int, PromptLogprobs | SampleError] = {}
    to_sample: list[int] = []
    row = 0
    for seq in sequences:
        if seq.scores is not None:
            scores[seq.sequence_id] = prompt_logprobs(logits[row : row + seq.num_scored], seq.scores)
        row += seq.num_scored
        to_sample += range(row, row + seq.num_logits)
        row += seq.num_logits
    return (scores, logits[to_sample]) if scores else (scores, logits)


def _with_scores(
    sequences: Sequence[ScheduledSequence], results: Sequence[SequenceResult], scores: _Scores
) -> tuple[SequenceResult, ...]:
    sampled = {result.sequence_id: result for result in results}
    both = []
    for seq in sequences:
        result, score = sampled.get(seq.sequence_id), scores.get(seq.sequence_id)
        if isinstance(score, SampleError):
            result = SequenceResult(seq.sequence_id, error=score.reason)
        elif score is not None and (result is None or result.error is None):
            result = replace(result or SequenceResult(seq.sequence_id), prompt_logprobs=score)
        if result is not None:
            both.append(result)
    return tuple(both)


def _sample(
    sequences: list[ScheduledSequence],
    specs: list[SampleSpec],  # of all their samples
    logits: torch.Tensor,
    draws: DrawCandidates | None,
    allowed: Allowed,
) -> tuple[SequenceResult, ...]:
    """One row of logits serves all choices of its sequence; with drafts there is one for each sample."""
    if len(specs) > logits.shape[0]:
        uses = [1 if seq.draft_token_ids else len(seq.samples) for seq in sequences for _ in range(seq.num_logits)]
        logits = logits.repeat_interleave(torch.tensor(uses, device=logits.device), dim=0)
    drawn = iter(sample(logits, specs, draws, allowed))
    return tuple(_result(seq, [next(drawn) for _ in seq.samples]) for seq in sequences)


def _result(sequence: ScheduledSequence, drawn: list[SampledToken | SampleError]) -> SequenceResult:
    if sequence.draft_token_ids:
        drawn = _verified(sequence.draft_token_ids, drawn)
    errors = [token.reason for token in drawn if isinstance(token, SampleError)]
    if errors:
        return SequenceResult(sequence.sequence_id, error=errors[0])
    tokens = tuple(token for token in drawn if isinstance(token, SampledToken))
    runs = (tokens,) if sequence.draft_token_ids else tuple((token,) for token in tokens)
    return SequenceResult(sequence.sequence_id, runs)


def _verified(
    draft_token_ids: tuple[int, ...], drawn: list[SampledToken | SampleError]
) -> list[SampledToken | SampleError]:
    """What was drawn as long as every draft before it is what was drawn at its position; an error counts at first only.

    An error behind an accepted draft is found again by the next step, which begins with that row.
    """
    run = drawn[:1]
    for draft, token, following in zip(draft_token_ids, drawn[:-1], drawn[1:], strict=True):
        if isinstance(token, SampleError) or token.token_id != draft or isinstance(following, SampleError):
            break
        run.append(following)
    return run
