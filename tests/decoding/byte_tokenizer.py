"""A tokenizer of one token per byte, so that most characters take several tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"
#: Vocabulary: 256 bytes, then the end token.
SIZE = 257

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{% if "
    "add_generation_prompt %}>{% endif %}"
)


def byte_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """Id of byte `b` is the position of `b` in the byte-level alphabet's order; the end token comes last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    if chat:
        wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
