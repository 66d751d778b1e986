"""Whether trainer and sampling engine read text alike: vocabulary, end of sequence, and the batch's own prompts."""

from __future__ import annotations

from typing import Any

from driftscope.hooks import adapters

PROMPTS = 2


def disagreements(trainer: Any, inputs: adapters.Inputs) -> list[str] | None:
    """What differs between the engine's tokenizer and the trainer's, in words; ``None`` where the engine is not here.

    With ``vllm_mode='server'`` the engine is in another process, and its tokenizer cannot be asked.
    """
    engine = _engine(trainer)
    if engine is None:
        return None
    theirs = engine.get_tokenizer() if hasattr(engine, "get_tokenizer") else engine.tokenizer
    own = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    found = []
    if len(theirs) != len(own):
        found.append(f"vocabulary: {len(theirs)} tokens in the engine, {len(own)} in the trainer")
    if theirs.eos_token_id != own.eos_token_id:
        found.append(f"end of sequence: token {theirs.eos_token_id} in the engine, {own.eos_token_id} in the trainer")
    for ids, mask in zip(inputs["prompt_ids"][:PROMPTS], inputs["prompt_mask"][:PROMPTS], strict=True):
        text = own.decode(ids[mask.bool()].tolist(), skip_special_tokens=True)
        a, b = (list(t(text, add_special_tokens=False)["input_ids"]) for t in (theirs, own))
        if a != b:
            found.append(f"a prompt of {len(text)} characters: {len(a)} tokens in the engine, {len(b)} in the trainer")
            break
    return found


def _engine(trainer: Any) -> Any:
    """The colocated engine: TRL 0.28 and later keep it in ``vllm_generation``."""
    for owner in (trainer, getattr(trainer, "vllm_generation", None)):
        engine = getattr(owner, "llm", None)
        if engine is not None:
            return engine
    return None
