"""Exact tests of whether documents of a packed sequence affect each other: by the Jacobian between documents, and by
comparison with each document alone.

The tests take the gradient of some documents' outputs, in random directions, with respect to every token's embedding.
It is exactly zero at the other documents unless something of them was read; a whole batch of packings is one forward
and one backward pass. Forward, every token of the other documents is changed, and no bit may move. In fp64 a document
of a packed sequence also equals the same document alone, to rounding, so wrong positions are found too. Faults that are
put in on purpose must be found in every sequence that can show them.

A mixer whose sequences are divided among ranks is measured by all of them together, from the same generator.
"""

import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ptf.config.sections.compute import MeshSizes
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.meshes import Meshes
from ptf.model import bridge, hf_backend
from ptf.model.context_parallel import context_parallel
from ptf.model.families import family_of
from ptf.model.kernels import attention
from ptf.model.kernels.attention import Flex, PackedDelta, PerDocument
from ptf.model.kernels.delta_rule import Chunks
from ptf.model.reference import random_reference
from ptf.model.rounding import Margins
from ptf.model.tensor_parallel import all_gather
from ptf.model.verify import TIE
from tests.model.foreign import foreign

# families whose language model is that of another family: gemma3_text, qwen3_5_text, deepseek_v3, and mistral
# or ministral3
WRAPPERS = ("gemma3", "qwen3_5", "qwen3_5_moe", "glm4_moe_lite", "mistral3")
SEQ_LEN = 40
VOCAB = 30  # of the tokens that are drawn; every model has more


@dataclass(frozen=True)
class Mixer:
    """A way to mix tokens that is checked for leaks between documents.

    `backend` is PerDocument, Flex, or None where transformers decides. `bound` is the largest permitted difference
    between a packed document and the same one alone, as a share of the largest output. `settings` replace values of
    the family's small config. `sequences` is the number of sequences in a batch; each is divided among `context` ranks,
    which are those of the process group."""

    name: str
    model_type: str
    backend: Any
    bound: float = 1e-12
    dtype: torch.dtype = torch.float64
    settings: tuple[tuple[str, Any], ...] = field(default=(), hash=False)  # values may be lists: `layer_types`
    sequences: int = 500
    context: int = 1

    @property
    def gradients(self) -> bool:
        """Whether leaks are measured by gradients. Torch's FlexAttention has no backward on a CPU; there the tokens
        of other documents are changed, and no output may change."""
        return self.backend is not Flex

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of its batches, in turn; ranks do not divide all of them."""
        return (SEQ_LEN,) if self.context == 1 else (SEQ_LEN, SEQ_LEN - 3)

    @property
    def path(self) -> str:
        if self.backend is None:
            return "transformers"
        path = "FlexAttention's mask" if self.backend is Flex else "SDPA per document"
        return path if self.context == 1 else f"{path}, {self.context} ranks"

    @property
    def faults(self) -> "dict[str, Fault]":
        """The faults that this mixer can show; transformers counts positions itself, so wrong positions cannot be
        given to it, and linear attention refuses documents that do not begin at position 0. Linear attention has
        faults of its state alone and of its convolution alone, beside softmax layers that separate the documents."""
        linear = self.model_type.startswith(("qwen3_5", "qwen3_next"))
        wrong = {POSITIONS_NOT_RESET} if self.backend is None or linear else set()
        known = FAULTS | (OF_LINEAR if linear else {}) | (OF_CONTEXT if self.context > 1 else {})
        return {name: fault for name, fault in known.items() if name not in wrong}

    @property
    def crossing_faults(self) -> "dict[str, Fault]":
        """Those of the faults by which something of another document is read."""
        return {name: fault for name, fault in self.faults.items() if name != POSITIONS_NOT_RESET}


# Torch multiplies groups of rows in fp32 and bf16 only. 5e-6 is 40 roundings of fp32; the largest of 60,000 sequences
# was 1.4e-6, and every fault is above.
EXPERTS: dict[str, Any] = {"bound": 5e-6, "dtype": torch.float32}
NORMS = 1e-6  # transformers normalises in fp32, whatever it is given
EXAONE = (("sliding_window", 5), ("sliding_window_pattern", 2), ("layer_types", None))
MIXERS = [
    Mixer("softmax", "llama", PerDocument),
    Mixer("softmax, queries and keys normalised", "qwen3", PerDocument),
    Mixer("softmax, projections with a bias", "qwen2", PerDocument),
    Mixer("sliding window", "mistral", PerDocument, settings=(("sliding_window", 5),)),
    Mixer("sliding windows and whole, in turn", "gemma3_text", PerDocument),
    Mixer("sliding windows and whole, sinks, experts", "gpt_oss", PerDocument, **EXPERTS),
    Mixer("softmax, experts", "qwen3_moe", PerDocument, **{**EXPERTS, "bound": 1e-6}),
    Mixer("linear (gated delta rule, convolution) and softmax", "qwen3_5_text", PerDocument),
    Mixer("linear and softmax, experts and a shared one", "qwen3_5_moe_text", PerDocument, **EXPERTS),
    Mixer("linear of two matrices and softmax, experts", "qwen3_next", PerDocument, **EXPERTS),
    Mixer("softmax, experts and a shared one", "qwen2_moe", PerDocument, **{**EXPERTS, "bound": 1e-6}),
    Mixer("softmax of a part that is rotated, experts chosen by sigmoids", "glm4_moe", PerDocument, **EXPERTS),
    Mixer("latent", "deepseek_v3", PerDocument, **EXPERTS),
    Mixer("sliding windows and whole, soft-capped", "gemma2", PerDocument),
    Mixer("sliding windows and whole, soft-capped", "gemma2", Flex),
    Mixer("queries and keys normalised over all heads", "olmo2", PerDocument),
    Mixer("sliding windows and whole, frequencies of each", "olmo3", PerDocument),
    Mixer("some layers without positions", "smollm3", PerDocument, settings=(("no_rope_layer_interval", 2),)),
    Mixer("sliding windows, whole without positions", "exaone4", PerDocument, settings=EXAONE),
    Mixer("softmax, factors", "granite", PerDocument),
    Mixer("softmax, partly rotated", "phi3", PerDocument),
    Mixer("softmax, an output bias of its own", "seed_oss", PerDocument),
    Mixer("queries that grow with their position", "ministral3", PerDocument),
    Mixer("softmax", "llama", Flex),
    Mixer("sliding window", "mistral", Flex, settings=(("sliding_window", 5),)),
    Mixer("sliding windows and whole, in turn", "gemma3_text", Flex),
    Mixer("sliding windows and whole, sinks, experts", "gpt_oss", Flex, **EXPERTS),
    Mixer("latent", "deepseek_v3", Flex, **EXPERTS),
    Mixer("softmax (OLMo 2)", "olmo2", None, NORMS),
    Mixer("softmax, learned positions (GPT-2)", "gpt2", None),
    Mixer("softmax, experts (Mixtral)", "mixtral", None, **EXPERTS),
    Mixer("state space (Mamba)", "mamba", None, NORMS, sequences=100),
]


def of_heads(number: int, kv: int, **more: Any) -> tuple[tuple[str, Any], ...]:
    """Return settings of so many heads, and these."""
    return tuple({"num_attention_heads": number, "num_key_value_heads": kv, **more}.items())


LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
# each is also looked at with its sequences divided among 2 and 4 ranks; with more ranks than key-value heads, too
OF_RANKS = [
    Mixer("softmax", "llama", PerDocument, settings=of_heads(8, 2)),
    Mixer("sliding windows and whole, sinks, experts", "gpt_oss", PerDocument, settings=of_heads(8, 2), **EXPERTS),
    Mixer("sliding windows and whole, soft-capped", "gemma2", PerDocument, settings=of_heads(8, 4)),
    Mixer("latent", "deepseek_v3", PerDocument, settings=of_heads(4, 4), **EXPERTS),
    Mixer("linear and softmax", "qwen3_5_text", PerDocument, settings=of_heads(8, 2, **LINEAR)),
]


def divided(ranks: int) -> list[Mixer]:
    """Return the mixers whose sequences are divided among so many ranks."""
    return [replace(mixer, context=ranks) for mixer in OF_RANKS]


@cache
def model_of(mixer: Mixer) -> Any:
    """Return the mixer's random model; ranks that divide its sequences call it together."""
    if mixer.context == 1:
        return random_model(mixer)
    model = copy.deepcopy(model_of(replace(mixer, context=1)))
    context_parallel(model, Meshes.of("cpu", MeshSizes(context=mixer.context)))
    return model


def random_model(mixer: Mixer) -> Any:
    """Return a tiny model with random weights, in the mixer's precision."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        if mixer.backend is None:
            model = hf_backend.build(foreign(directory, mixer.model_type))
            model.give_weights(directory, torch.device("cpu"))
            return model.to(mixer.dtype)
        drawn = family_of({"model_type": mixer.model_type}).random_config(
            random.Random(f"attention/{mixer.model_type}")
        )
        random_reference({**drawn, **dict(mixer.settings)}, 0).save_pretrained(directory)
        return bridge.load(directory).to(mixer.dtype)


def lengths(rng: np.random.Generator, sequences: int, width: int = SEQ_LEN) -> list[list[int]]:
    """Return random lengths of the documents of each sequence of this width: one to nine documents of at least one
    token; some sequences end in padding."""
    found = []
    for _ in range(sequences):
        room = width if rng.random() < 0.6 else int(rng.integers(1, width + 1))
        cuts = (
            np.sort(rng.choice(np.arange(1, room), min(int(rng.integers(0, 9)), room - 1), replace=False))
            if room > 1
            else np.array([], int)
        )
        found.append(np.diff([0, *cuts.tolist(), room]).tolist())
    return found


def batch_of(sequences: list[list[int]], rng: np.random.Generator, width: int = SEQ_LEN) -> Batch:
    """Return a batch of documents of these lengths. Neighbouring tokens differ, so that attending to the wrong one
    changes the output."""
    found = []
    for each in sequences:
        tokens = (np.cumsum(rng.integers(1, VOCAB, sum(each))) % VOCAB).astype(np.int32)
        found.append(
            [(Document(part, np.ones(len(part), np.float32)),) for part in np.split(tokens, np.cumsum(each)[:-1])]
        )
    return Batch.of(found, width)


def outputs(
    model: Any, batch: Batch, backend: Any, segments: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the last layer's output for each token, [B, T, D], and the embeddings that it was computed from, of a
    group of ranks this one's part. `segments` and `positions` replace those of the batch."""
    segments, positions = (
        batch.segments if segments is None else segments,
        batch.positions if positions is None else positions,
    )
    seen: list[Tensor] = []
    embed = model.embed if hasattr(model, "embed") else model.hf.get_input_embeddings()
    hook = embed.register_forward_hook(
        lambda module, args, out: seen.append(out.detach().requires_grad_(torch.is_grad_enabled())) or seen[-1]
    )
    try:
        if backend is not None:
            model.attention = lambda segments, positions, varlen: backend(segments, positions)
        found = model(batch.tokens, positions, segments, lambda x, head: x)
    finally:
        hook.remove()
    return found, seen[0]


def at_tokens(model: Any, batch: Batch, gradient: Tensor, segments: Tensor) -> Tensor:
    """Return the gradient of the embeddings at the batch's tokens, [B, T, D]. Transformers gets one sequence a
    document, so its gradient is moved back to the places of the tokens; a rank has that of its part."""
    if model.group is not None:
        return all_gather(gradient, model.group)[:, : batch.tokens.shape[1]]
    if gradient.shape[:2] == batch.tokens.shape:
        return gradient
    index, _ = hf_backend.document_places(segments)
    found = gradient.new_zeros(batch.tokens.numel(), gradient.shape[-1])
    return found.index_add_(0, index.reshape(-1), gradient.flatten(0, 1)).view(*batch.tokens.shape, -1)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run FlexAttention without compiling it: on a CPU the compiled one has no gradients, and only its mask is
    tested here."""
    before, attention._compiled_flex = attention._compiled_flex, lambda: attention._flex
    try:
        yield
    finally:
        attention._compiled_flex = before


def alone(model: Any, batch: Batch, backend: Any) -> Tensor:
    """Return the output for each token, [B, T, D], with every document in a sequence of its own and without padding.
    Documents of one length are computed in one batch."""
    flat = batch.segments.reshape(-1)
    where = [(flat == n).nonzero().squeeze(1) for n in range(int(flat.max()) + 1)]
    found: Tensor | None = None
    for n in sorted({len(at) for at in where}):
        at = torch.stack([at for at in where if len(at) == n])  # [documents, n]
        number, positions = (
            torch.arange(len(at))[:, None].expand(-1, n).contiguous(),
            torch.arange(n).expand(len(at), n).contiguous(),
        )
        each = Batch.of(
            [[(Document(tokens, np.ones(n, np.float32)),)] for tokens in batch.tokens.reshape(-1)[at].numpy()], n
        )
        assert torch.equal(each.segments, number)
        assert torch.equal(each.positions, positions)
        said = outputs(model, each, backend)[0].detach()
        found = said.new_zeros(len(flat), said.shape[-1]) if found is None else found
        found[at] = said
    assert found is not None
    return found.view(*batch.tokens.shape, -1)


def as_they_are(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.segments, batch.positions


def unchanged(segments: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return segments, positions


@dataclass(frozen=True)
class Fault:
    """Something wrong: the segments and positions that a model is told of a batch, those that its backend is told, or
    what linear attention makes of them."""

    told: Callable[[Batch], tuple[Tensor, Tensor]] = as_they_are
    backend_told: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = unchanged
    delta: Callable[[Tensor, Tensor], PackedDelta] = PackedDelta

    def backend(self, kind: Any, segments: Tensor, positions: Tensor) -> Any:
        """Return the backend of this kind, with the fault."""
        found = kind(*self.backend_told(segments, positions))
        if self.delta is not PackedDelta:
            found.packed_delta = self.delta(segments, positions)
        return found


def mask_off_by_one(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return segments in which the last token of each document belongs to the next document."""
    first = (batch.positions == 0) & (batch.segments > batch.segments[:, :1])
    early = torch.cat((first[:, 1:], torch.zeros_like(first[:, :1])), 1)
    segments = torch.where(early, batch.segments + 1, batch.segments)
    return segments, _counted(segments)


def positions_not_reset(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.segments, torch.arange(batch.tokens.shape[1]).expand_as(batch.positions)


def row_shifted(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return segments that are shifted right by one token."""
    segments = torch.cat((batch.segments[:, :1], batch.segments[:, :-1]), 1)
    return segments, _counted(segments)


def of_own_part(segments: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return segments as if this rank knew its own part only: its first document begins with the sequence, and its last
    one ends with it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own, size = segments.chunk(ranks, 1)[rank], segments.shape[1] // ranks
    row = torch.arange(len(segments))[:, None]
    first = torch.where(own[:, :1] < 0, segments.max() + 1 + row, own[:, :1])
    before, behind = first.expand(-1, rank * size), own[:, -1:].expand(-1, (ranks - rank - 1) * size)
    segments = torch.cat((before, own, behind), 1)
    return segments, _counted(segments)


def _counted(segments: Tensor) -> Tensor:
    at = torch.arange(segments.shape[1]).expand_as(segments)
    starts = torch.cat((torch.ones_like(segments[:, :1], dtype=torch.bool), segments[:, 1:] != segments[:, :-1]), 1)
    return at - torch.where(starts, at, 0).cummax(1).values


def state_kept(segments: Tensor, positions: Tensor) -> PackedDelta:
    """Return linear attention whose state goes on from document to document."""
    found = PackedDelta(segments, positions)
    row = torch.arange(len(segments))[:, None].expand_as(segments)
    found.chunks = Chunks.of(torch.where(segments >= 0, row, -1), found.chunks.size)
    return found


def convolution_across(segments: Tensor, positions: Tensor) -> PackedDelta:
    """Return linear attention whose convolution reads the tokens before a document."""
    found = PackedDelta(segments, positions)
    found.positions = torch.arange(segments.shape[1]).expand_as(segments)
    return found


POSITIONS_NOT_RESET = "positions not reset"
FAULTS = {
    "mask off by one": Fault(mask_off_by_one),
    POSITIONS_NOT_RESET: Fault(positions_not_reset),
    "row shifted": Fault(row_shifted),
}
OF_CONTEXT = {"backend of a rank's own part": Fault(backend_told=of_own_part)}
OF_LINEAR = {"state kept": Fault(delta=state_kept), "convolution across": Fault(delta=convolution_across)}


@dataclass(frozen=True)
class Found:
    """Measurements by sequence of the batch: the largest gradient (without gradients: the largest change of an output)
    that crosses from one document to another, and the largest difference from each document alone. Both are shares
    of the largest value. `ties` documents are left out of the differences: rounding chose other experts for them."""

    crossing: Tensor
    apart: Tensor
    ties: int


@dataclass(frozen=True)
class _Question:
    """What a model is told of a batch, and the tokens whose outputs are asked for."""

    backend: Any
    segments: Tensor
    positions: Tensor
    asked: Tensor  # [B, T]

    @staticmethod
    def drawn(
        mixer: Mixer, batch: Batch, rng: np.random.Generator, fault: Fault | None, odd: bool = True
    ) -> "_Question":
        """Choose some documents at random; with a fault those of odd or of even number. A fault goes to the next
        document, so the first of a sequence shows none."""
        told = as_they_are if fault is None else fault.told
        backend = mixer.backend if fault is None or mixer.backend is None else partial(fault.backend, mixer.backend)
        real, number = batch.segments >= 0, batch.segments - batch.segments[:, :1]
        odd = bool(rng.random() < 0.5) if fault is None else odd
        asked = real & (number % 2 == int(odd))
        if fault is None and rng.random() < 0.5:
            asked = (
                real & torch.from_numpy(rng.random(int(batch.segments.max()) + 1) < 0.5)[batch.segments.clamp(min=0)]
            )
        return _Question(backend, *told(batch), asked)

    def answer(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return what `outputs` returns."""
        return outputs(model, batch, self.backend, self.segments, self.positions)

    def moved(self, model: Any, batch: Batch, said: Tensor) -> Tensor:
        """Return for each sequence by how much the outputs that are asked for differ from `said` when every token of
        the other documents is another one."""
        other = replace(batch, tokens=torch.where(self.asked, batch.tokens, (batch.tokens + 1) % VOCAB))
        change = (self.answer(model, other)[0] - said).abs().amax(-1)
        return torch.where(self.asked, change, 0).amax(1) / said.abs().max()


def look(mixer: Mixer, batch: Batch, rng: np.random.Generator, fault: Fault | None = None) -> Found:
    """Measure the leaks of a batch: some of its documents are chosen, and no other document may affect their
    outputs."""
    model, whole, real = model_of(mixer), model_of(replace(mixer, context=1)), batch.segments >= 0
    question = _Question.drawn(mixer, batch, rng, fault)
    with uncompiled(), torch.set_grad_enabled(mixer.gradients):
        said, embedded = question.answer(model, batch)
        if mixer.gradients:
            upstream = torch.from_numpy(rng.normal(size=tuple(said.shape))).to(said.dtype) * question.asked[..., None]
            (gradient,) = torch.autograd.grad((said * upstream).sum(), embedded)
            gradient = at_tokens(model, batch, gradient, question.segments).abs().amax(-1)
            crossing = torch.where(question.asked, 0, gradient).amax(1) / gradient.max().clamp(min=1e-300)
        else:
            crossing = question.moved(model, batch, said)
    with uncompiled(), torch.no_grad():
        # what FlexAttention finds in a sequence is what SDPA finds of a document
        one_by_one = alone(whole, batch, mixer.backend and PerDocument)
    apart = torch.where(real, (said.detach() - one_by_one).abs().amax(-1), 0) / one_by_one.abs().max()
    ties = 0
    if fault is None and bool((apart > mixer.bound).any()):
        with uncompiled(), torch.no_grad(), Margins() as margins:
            question.answer(whole, batch)
        tied = with_ties(batch.segments, margins.seen)
        ties = len(batch.segments[tied & (apart > mixer.bound)].unique())
        apart = apart.masked_fill(tied, 0)
    return Found(crossing.detach(), apart.amax(1), ties)


def with_ties(segments: Tensor, choices: Sequence[Tensor]) -> Tensor:
    """Return which tokens [B, T] are in a document that has a token whose experts are chosen by a margin within the
    verifier's tolerance. `choices` are the margins of each choice, whose first dimension is that of all tokens."""
    close = torch.zeros(segments.numel(), dtype=torch.bool)
    for margins in choices:
        if len(margins) == len(close):  # transformers computes the documents in another order
            close |= margins.reshape(len(close), -1).amin(1) <= TIE
    return (segments >= 0) & torch.isin(segments, segments[close.view_as(segments)])


@torch.no_grad()
def moved(mixer: Mixer, batch: Batch, rng: np.random.Generator, fault: Fault | None = None) -> Tensor:
    """Return for each sequence of a batch the largest change of a chosen document's outputs when every token of the
    other documents changes, as a share of the largest output. Without a fault, no bit may change."""
    model, found = model_of(mixer), torch.zeros(len(batch.tokens), dtype=torch.float64)
    for odd in (True,) if fault is None else (True, False):  # a fault may reach documents of one kind only
        question = _Question.drawn(mixer, batch, rng, fault, odd)
        with uncompiled():
            change = question.moved(model, batch, question.answer(model, batch)[0])
        found = torch.maximum(found, change.to(found.dtype))
    return found
