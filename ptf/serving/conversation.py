"""A conversation with a checkpoint, for `ptf chat`.

The model is used as it was trained: with the chat template of its own tokenizer.
"""

import numpy as np
import torch

from ptf.data.context import raise_if_unseen
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.model_directory import ServedDirectory
from ptf.rl.engines.native import NativeEngine, served_dtype
from ptf.rl.engines.protocol import Request, Sampling

LONGEST = 256  # tokens of a response, where no other number is given


class Chat:
    """A conversation with a model.

    `where` is a directory, a directory of versions, a URI or a Hugging Face id, of a whole model or of an adapter in
    PEFT format, whose base model is then loaded too. If the tokenizer has no chat template, the model continues each
    text by itself, without the earlier ones. A response has at most `max_new_tokens`; without it 256, or what the model
    can still read.
    """

    def __init__(
        self,
        where: str,
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.7,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        found = ServedDirectory.find(where)
        if found.scores:
            raise UserError(f"{where} is a reward model: it scores responses, and cannot generate them")
        self.tokenizer = Tokenizer.load(str(found.tokenizer))
        if system and not self.tokenizer.hf.chat_template:
            raise UserError(f"{where} has no chat template, so it cannot take a system message")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.engine = NativeEngine(
            str(found.base), device=device, dtype=served_dtype(found.base, device), version=0, factory=found.factory()
        )
        found.fill(self.engine)
        self.max_new_tokens = max_new_tokens
        self.temperature, self.top_p = temperature, top_p if temperature else 1.0
        self.system_messages = [{"role": "system", "content": system}] if system else []
        self.messages, self.seed, self.answers = [*self.system_messages], seed, 0

    def answer(self, text: str) -> str:
        """Return the model's response to the conversation so far and `text`.

        Raises UserError, and does not add `text` to the conversation, if both are longer than the model can read.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        has_template = bool(self.tokenizer.hf.chat_template)
        shown = self.tokenizer.render_text(messages, True) if has_template else ""
        if has_template:
            raise_if_unseen(messages, shown, self.tokenizer)
        context = np.array(self.tokenizer.encode(shown) if has_template else self.tokenizer.begin(text), np.int32)
        limit = self.engine.model.config.max_positions
        longest = self.max_new_tokens or max(1, min(LONGEST, limit - len(context)))
        if len(context) + longest > limit:
            raise UserError(
                f"{len(context)} tokens and up to {longest} tokens of response "
                f"are more than the {limit} that the model can read"
            )
        sampling = Sampling(longest, self.temperature, self.tokenizer.stop_ids, self.top_p)
        (generation,) = self.engine.answer([Request(context, sampling, self.seed + self.answers)])
        answer = self.tokenizer.decode(generation.sampled_ids[:-1] if generation.finished else generation.sampled_ids)
        self.answers += 1
        if has_template:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def forget(self) -> None:
        """Start a new conversation, with the same system message."""
        self.messages = [*self.system_messages]
