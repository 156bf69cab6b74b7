"""A tokenizer with one id for each character, for tasks small enough for a CPU."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ptf.data.tokenizer import Tokenizer
from ptf.data.tokenizer_files import write_tokenizer

ROLES = ("system", "user", "assistant", "tool")
CHARACTER_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|><|' + m.role + '|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>' }}{% endif %}"
)


def character_tokenizer(alphabet: str, directory: str | Path, words: Sequence[str] = ()) -> Tokenizer:
    """Write a tokenizer with one id per character as a directory for AutoTokenizer, and load it.

    It is for tasks small enough for a CPU. `encode` refuses characters outside the alphabet. Each of `words` is one
    token too, wherever it stands.
    """
    special = ["<|pad|>", "<unk>", "<|im_start|>", "<|im_end|>", *(f"<|{role}|>" for role in ROLES)]
    vocab = {token: i for i, token in enumerate([*special, *sorted(set(alphabet))])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[token for token in special if token not in ("<|pad|>", "<unk>", "<|im_end|>")],
    )
    hf.chat_template = CHARACTER_TEMPLATE
    write_tokenizer(hf, directory)
    return Tokenizer.load(str(directory))
