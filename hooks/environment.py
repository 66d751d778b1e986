"""A user's tool environment for the demo: turns, tool results of uneven length, episodes that end early.

TRL 0.27.2 refuses ``tools=`` under transformers 4, and its own loop wants a chat model that writes tool calls. So this
subclass does what users with an environment of their own do: it answers ``_tool_call_loop``, the seam at which TRL
asks for the tool mask. Generation, log-probs, advantages and loss stay TRL's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOTrainer

ASK_WORDS = range(32)  # word ids that ask for a lookup; the first one after MIN_TURN tokens ends the turn
DONE_WORDS = range(32, 64)  # word ids that end the episode after MIN_POLICY policy tokens
MIN_TURN = 4
MIN_POLICY = 18


def lookup(word: int) -> list[int]:
    """The tool: the result's word ids for the word that asked; 3 to 8 of them."""
    return [ASK_WORDS.stop + (7 * word + k) % 400 for k in range(3 + word % 6)]


@dataclass
class Episode:
    """One completion as the environment sees it: ids, sampling log-probs (nats), and 1 for the policy's tokens."""

    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    policy: list[int] = field(default_factory=list)

    def say(self, token_ids: list[int], logps: list[float]) -> None:
        """Tokens that the policy sampled."""
        self.token_ids += token_ids
        self.logps += logps
        self.policy += [1] * len(token_ids)

    def hear(self, token_ids: list[int]) -> None:
        """Tokens of a tool result: log-prob 0, as TRL writes it."""
        self.token_ids += token_ids
        self.logps += [0.0] * len(token_ids)
        self.policy += [0] * len(token_ids)

    def finish(self, limit: int) -> None:
        """End at the first done word after enough policy tokens, or at the limit."""
        end, spoken = min(limit, len(self.token_ids)), 0
        for position, (token, mine) in enumerate(zip(self.token_ids[:end], self.policy, strict=False)):
            spoken += mine
            if mine and spoken >= MIN_POLICY and token in DONE_WORDS:
                end = position + 1
                break
        del self.token_ids[end:], self.logps[end:], self.policy[end:]


class ToolEnvironmentTrainer(GRPOTrainer):  # type: ignore[misc]
    """``GRPOTrainer`` in which the policy can ask for a lookup once an episode."""

    def _tool_call_loop(
        self,
        prompts: list[Any],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        completions: list[Any],
        logprobs: list[list[float]],
        *multimodal: Any,
    ) -> tuple[Any, ...]:
        """Play the episodes. Returns what TRL's own loop returns; TRL 1 passes and expects images as well."""
        episodes = []
        contexts: dict[int, list[int]] = {}
        for row, (ids, logps) in enumerate(zip(completion_ids, logprobs, strict=True)):
            episode = Episode()
            asks = [i for i, token in enumerate(ids) if i >= MIN_TURN and token in ASK_WORDS]
            turn = asks[0] + 1 if asks else len(ids)
            episode.say(ids[:turn], logps[:turn])
            if asks:
                episode.hear(lookup(ids[asks[0]]))
                if len(episode.token_ids) < self.max_completion_length:
                    contexts[row] = [*prompt_ids[row], *episode.token_ids]
            episodes.append(episode)
        if contexts:
            spoken = self._continue(list(contexts.values()), bool(multimodal))
            for row, (ids, logps) in zip(contexts, spoken, strict=True):
                episodes[row].say(ids, logps)
        for episode in episodes:
            episode.finish(self.max_completion_length)
        ids_played = [episode.token_ids for episode in episodes]
        calls = sum(0 in episode.policy for episode in episodes)
        played = (
            [episode.policy for episode in episodes],
            self.processing_class.batch_decode(ids_played, skip_special_tokens=True),
            ids_played,
            [episode.logps for episode in episodes],
            calls,
            0,
        )
        return (*played, [[] for _ in episodes]) if multimodal else played

    def _continue(self, contexts: list[list[int]], from_ids: bool) -> list[tuple[list[int], list[float]]]:
        """The policy's next turn after each context, sampled by TRL's own generation."""
        if from_ids:
            token_ids, logps = self._generate_single_turn(contexts, None, {}, self.num_generations)
        else:
            texts = self.processing_class.batch_decode(contexts, skip_special_tokens=False)
            seen, token_ids, logps, _ = self._generate_single_turn(texts)
            if seen != contexts:
                raise RuntimeError("The text of a context does not tokenize back to its ids.")
        return list(zip(token_ids, logps, strict=True))
