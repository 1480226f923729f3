"""What ExecuTorch's own `TextLLMRunner` reads from a program besides its `forward` method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    from ...program.program import Program


def runner_metadata(program: Program, required: bool = True) -> dict[str, Any]:
    """Constant methods by name (extension/llm/runner/constants.h of ExecuTorch 1.4).

    `get_max_seq_len` is the longest chunk of a prompt, `get_max_context_len` what the cache holds. Ids that the model
    does not state are left to the tokenizer's own.

    Args:
        program: Has a method `forward`.
        required: Refuse a program that the runner would reject; without it such a program gets no metadata.

    Raises:
        InputError: If it is required, and `forward` takes more than the runner gives, or several rows, or the cache has
            no limit to state and the model has no longest position either.
    """
    taken = program.methods["forward"].input_names
    if taken != ("input_ids", "input_pos"):
        if not required:
            return {}
        raise InputError(
            f"the runner gives input_ids and input_pos, forward takes {', '.join(taken)}; export without llm_runner"
        )
    if program.batch_size != 1:
        if not required:
            return {}
        raise InputError(f"the runner feeds one row, the program has {program.batch_size}; export without llm_runner")
    config = program.model.config.get_text_config(decoder=True)
    context = program.cache.max_length or getattr(config, "max_position_embeddings", None)
    if context is None and not required:
        return {}
    if context is None:
        raise InputError(
            "the cache holds any number of tokens and the config has no max_position_embeddings, so there is no "
            "context length to tell the runner; export without llm_runner"
        )
    metadata: dict[str, Any] = {
        "get_max_seq_len": program.methods["forward"].max_length,
        "get_max_context_len": context,
        "get_vocab_size": config.vocab_size,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "use_sdpa_with_kv_cache": False,
    }
    generation = program.model.generation_config
    if generation is not None and generation.bos_token_id is not None:
        metadata["get_bos_id"] = generation.bos_token_id
    if generation is not None and generation.eos_token_id is not None:
        ends = generation.eos_token_id
        metadata["get_eos_ids"] = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return metadata
