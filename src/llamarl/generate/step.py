"""The computations of generation, with fixed shapes: read whole sequences, extend cached ones, decode one token per slot."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.generate.attention import ChunkAttention, DecodeAttention, ExtendAttention, PrefillAttention, Readings
from llamarl.generate.beside import BesideAttention, PromptAttention, PromptRows
from llamarl.generate.kv_cache import PagedCache
from llamarl.generate.sampling import sample_tokens, seed_state, uniform_draws
from llamarl.generate.slots import SlotState
from llamarl.model.ops import Rope
from llamarl.model.rope import rope_up_to
from llamarl.model.transformer import Attend, Transformer


class Steps:
    """The passes of one model over its cache and slots."""

    def __init__(
        self, model: Transformer, cache: PagedCache, state: SlotState, table_SP: Tensor, *, seed: int, length: int
    ) -> None:
        self.model, self.cache, self.state, self.table_SP, self._seed = model, cache, state, table_SP, seed
        self._rope = rope_up_to(model.shape, length, state.device)
        self._side = torch.cuda.Stream() if state.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def prefill(self, tokens_RT: Tensor, pages_RT: Tensor) -> None:
        """Write keys and values of whole sequences to their pages. The last token of each is left to the first decode step,
        so that every sampled token comes out of the same computation."""
        positions_RT = torch.arange(tokens_RT.shape[1], device=tokens_RT.device).expand(tokens_RT.shape)
        attend = PrefillAttention(self.cache, pages_RT)
        self._pass(tokens_RT, positions_RT, attend, pages_RT, self._rope_at(positions_RT))

    @torch.inference_mode()
    def extend(self, tokens_RT: Tensor, positions_RT: Tensor, pages_RT: Tensor, table_RP: Tensor) -> None:
        """Write keys and values of tokens that follow cached sequences, such as a tool's reply."""
        attend = ExtendAttention(self.cache, table_RP, positions_RT, pages_RT)
        self._pass(tokens_RT, positions_RT, attend, pages_RT, self._rope_at(positions_RT))

    @torch.inference_mode()
    def extend_one(self, tokens_T: Tensor, positions_T: Tensor, pages_T: Tensor, table_P: Tensor, end: int) -> None:
        """The same for many tokens of one sequence, which then has `end` of them, on a GPU."""
        attend = ChunkAttention(self.cache, table_P, positions_T, pages_T, end)
        positions_1T = positions_T[None]
        self._pass(tokens_T[None], positions_1T, attend, pages_T, self._rope_at(positions_1T))

    @torch.inference_mode()
    def decode(
        self,
        slots_B: Tensor,
        *,
        filtered: bool,
        readings: Readings | None = None,
        parts: int = 0,
        drafted: bool = False,
        beside: PromptRows | None = None,
    ) -> None:
        """Sample one more token for each of these slots; inactive slots stay as they are. With `drafted`, several may hold
        the same sequence at different positions. Tokens `beside` them are read by the way."""
        state, count = self.state, len(slots_B)
        tokens_B, positions_B, table_BP = state.tokens[slots_B], state.positions[slots_B], None
        if self.cache.routes is not None:
            table_BP = self.table_SP[slots_B]
        answers = DecodeAttention(
            self.cache, self.table_SP, slots_B, state.positions, self._rope, readings, parts=parts, drafted=drafted
        )
        attend: Attend = answers
        if beside is not None:
            tokens_B = torch.cat([tokens_B, beside.tokens_M])
            positions_B = torch.cat([positions_B, beside.positions_M])
            table_BP = None if table_BP is None else torch.cat([table_BP, beside.table_MP])
            attend = BesideAttention(count, answers, PromptAttention(self.cache, beside, self._rope), self._side)
        positions_B1 = positions_B[:, None]
        pages_B1 = None if table_BP is None else table_BP.long().gather(1, positions_B1 // self.cache.page_tokens)
        hidden_B1C = self._pass(tokens_B[:, None], positions_B1, attend, pages_B1)
        logits_BV = self.model.logits(hidden_B1C[:count, 0])
        if logits_BV.is_cuda:
            from llamarl.generate.sampling_kernels import sample_and_advance

            sample_and_advance(logits_BV, slots_B, state, seed_state(self._seed), filtered=filtered)
            return
        draws_B = uniform_draws(self._seed, state.ordinals[slots_B], state.samples[slots_B], state.counts[slots_B])
        state.advance(slots_B, *sample_tokens(logits_BV, draws_B, state.sampling_of(slots_B), filtered=filtered))

    def _pass(
        self, tokens_RT: Tensor, positions_RT: Tensor, attend: Attend, pages: Tensor | None, rope: Rope | None = None
    ) -> Tensor:
        """The last hidden states. Where experts are recorded, they go to the page of each token."""
        routes = self.cache.routes
        if routes is None or pages is None:
            hidden: Tensor = self.model(tokens_RT, positions_RT, attend, rope)
            return hidden
        chosen_NLK = routes.empty(tokens_RT.numel())
        hidden = self.model(tokens_RT, positions_RT, attend, rope, chosen=chosen_NLK)
        routes.put(pages.flatten(), (positions_RT % self.cache.page_tokens).flatten(), chosen_NLK)
        return hidden

    def _rope_at(self, positions_BT: Tensor) -> Rope:
        return tuple(part[positions_BT] for part in self._rope)
