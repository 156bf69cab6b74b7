"""Talking to a checkpoint: what `ptf chat` does. The one idea: it is served as it was trained, by the template of its own tokenizer."""

import numpy as np
import torch

from ptf.data.context import refuse_unseen
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import bridge
from ptf.rl.engine import Request, Sampling
from ptf.rl.native_engine import NativeEngine


class Chat:
    """A conversation with the model at `where`: a directory, a directory of versions, a URI or a Hugging Face id. A tokenizer without a chat template has
    none: each text is then gone on with by itself."""

    def __init__(
        self, where: str, *, system: str | None = None, max_new_tokens: int = 256, temperature: float = 0.7, top_p: float = 1.0, seed: int = 0
    ) -> None:
        place = bridge.locate(where)
        if any("SequenceClassification" in name for name in bridge.read_config(place).get("architectures") or ()):
            raise UserError(f"{where} is a reward model: it scores answers, and gives none")
        self.tokenizer = Tokenizer.load(str(place))
        if system and not self.tokenizer.hf.chat_template:
            raise UserError(f"{where} has no chat template, so it has no system message")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.engine = NativeEngine(str(place), device=device, dtype=bridge.export_dtype(place), version=0)
        self.sampling = Sampling(max_new_tokens, temperature, self.tokenizer.stop_ids, top_p if temperature else 1.0)
        self.begun = [{"role": "system", "content": system}] if system else []
        self.messages, self.seed, self.answers = [*self.begun], seed, 0

    def answer(self, text: str) -> str:
        """To what was said so far and `text`. Raises UserError, and forgets the text, where that is longer than the model can read."""
        said = [*self.messages, {"role": "user", "content": text}]
        chats = bool(self.tokenizer.hf.chat_template)
        shown = self.tokenizer.render_text(said, True) if chats else ""
        if chats:
            refuse_unseen(said, shown, self.tokenizer)
        context = np.array(self.tokenizer.encode(shown) if chats else self.tokenizer.begin(text), np.int32)
        limit = self.engine.model.config.max_positions
        if len(context) + self.sampling.max_new_tokens > limit:
            raise UserError(f"{len(context)} tokens, and {self.sampling.max_new_tokens} to answer, are more than the {limit} that the model can read")
        (call,) = self.engine.answer([Request(context, self.sampling, self.seed + self.answers)])
        found = self.tokenizer.decode(call.sampled[:-1] if call.finished else call.sampled)
        self.answers += 1
        if chats:
            self.messages = [*said, {"role": "assistant", "content": found}]
        return found

    def forget(self) -> None:
        """All but the system message."""
        self.messages = [*self.begun]
