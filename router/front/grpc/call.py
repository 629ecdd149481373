"""One `Generate` call: what the front end says about a request becomes messages on its stream."""

from contextlib import aclosing

from common.values.errors import WorkerFailed
from common.values.request import PromptLogprobs
from common.wire.pb import generation_pb2 as pb
from router.core.generation import Accepted
from router.front.frontend import Frontend
from router.front.grpc.errors import Context
from router.front.grpc.responses import accepted_pb, add_prompt_logprobs, chunk_pb, echo_pb, finished_pb
from router.front.output import Deltas, Summary, Update
from router.front.scored_prompt import ScoredPrompt
from router.request.validation import ValidRequest
from router.text.calls.choice import joined_calls
from router.text.choice_text import ChoiceDelta, ChoiceEnd


class GenerateCall:
    """Owns the call until its end. Without `stream` there is one chunk per choice, at the end."""

    def __init__(self, request: pb.GenerateRequest, valid: ValidRequest, frontend: Frontend, context: Context) -> None:
        self._request = request
        self._valid = valid
        self._frontend = frontend
        self._context = context
        self._deltas: list[ChoiceDelta] = []
        self._ends: dict[int, ChoiceEnd] = {}
        self._echoed: set[int] = set()
        self._prompt = ScoredPrompt(valid.generation.token_ids)

    async def run(self) -> None:
        try:
            async with aclosing(self._frontend.answers.run(self._valid)) as updates:
                async for _, update in updates:
                    await self._write_update(update)
        except WorkerFailed as error:
            if self._echoed or self._ends or self._deltas:
                error.grpc_code = "INTERNAL"  # ABORTED says that a retry is safe; output has been given already
            raise

    async def _write_update(self, update: Update) -> None:
        match update:
            case Accepted():
                await self._write(accepted=accepted_pb(update))
            case PromptLogprobs():
                self._prompt.pieces.append(update)
            case Deltas():
                for delta in update.deltas:
                    await self._take(delta)
            case Summary():
                await self._finish(update)

    async def _take(self, delta: ChoiceDelta) -> None:
        if delta.end is not None:
            self._ends[delta.choice_idx] = delta.end
        if self._request.stream:
            await self._write_chunk(delta)
        else:
            self._deltas.append(delta)

    async def _finish(self, summary: Summary) -> None:
        num_discarded = summary.num_completion_tokens - sum(end.num_tokens for end in self._ends.values())
        for index in range(self._valid.generation.num_returned):
            if not self._request.stream:
                await self._write_chunk(_joined(index, self._deltas))
            has_timings = self._request.output.return_timings
            end = self._ends[index]
            await self._write(finished=finished_pb(index, end, summary, num_discarded, has_timings=has_timings))

    async def _write_chunk(self, delta: ChoiceDelta) -> None:
        index = delta.choice_idx
        if index not in self._echoed:
            self._echoed.add(index)
            await self._write_prompt(index)
        output = self._request.output
        num_logprobs = output.logprobs if output.HasField("logprobs") else None
        await self._write(chunk=chunk_pb(delta, num_logprobs, self._frontend.token_texts))

    async def _write_prompt(self, index: int) -> None:
        """As far as the client wants to have it back, or to know of it."""
        text, num_top = self._valid.echo_text, self._valid.generation.num_prompt_logprobs
        first = pb.TokenChunk(index=index) if text is None else echo_pb(index, self._prompt.token_ids, text)
        if num_top is not None:
            for chunk in add_prompt_logprobs(first, self._prompt, num_top, self._frontend.token_texts):
                await self._write(chunk=chunk)
        elif text is not None:
            await self._write(chunk=first)

    async def _write(
        self,
        accepted: pb.Accepted | None = None,
        chunk: pb.TokenChunk | None = None,
        finished: pb.Finished | None = None,
    ) -> None:
        await self._context.write(
            pb.GenerateResponse(request_id=self._request.request_id, accepted=accepted, chunk=chunk, finished=finished)
        )


def _joined(index: int, deltas: list[ChoiceDelta]) -> ChoiceDelta:
    own = [delta for delta in deltas if delta.choice_idx == index]
    tokens = tuple(token for delta in own for token in delta.tokens)
    return ChoiceDelta(
        index,
        tokens,
        "".join(delta.text for delta in own),
        reasoning="".join(delta.reasoning for delta in own),
        calls=joined_calls(part for delta in own for part in delta.calls),
    )
