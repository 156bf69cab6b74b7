"""In every family, a document packed behind a shared prefix gives the same logits, log-probs and gradients as one that
repeats the prefix."""

import numpy as np
import pytest
import torch

from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.packing import pack_all
from ptf.data.prefixes import pack_shared, prefix_groups
from ptf.model.chunked import cross_entropy, token_logprobs
from ptf.model.families import MODULES
from ptf.model.kernels import attention
from tests.model.leakage import WRAPPERS
from tests.model.test_attention import model_of, raise_if_masks_differ

SEQ_LEN = 96
SHARING = [m for m in MODULES if m not in WRAPPERS and model_of(m).supports_shared_prefixes]


def test_linear_attention_shares_no_prefix() -> None:
    model = model_of("qwen3_5_text")
    assert not model.supports_shared_prefixes
    batch = Batch.of(pack_shared(answers(model.config.vocab), SEQ_LEN), SEQ_LEN)
    with pytest.raises(ValueError, match="continues a shared prefix has no state"):
        model(batch.tokens, batch.positions, batch.segments, lambda x, head: x)


def answers(vocab: int, prompts: int = 3, each: int = 4, seed: int = 0) -> list[PackUnit]:
    """Return samples whose answers have different lengths. Their prompts are longer than any small model's window."""
    rng = np.random.default_rng(seed)
    made: list[PackUnit] = []
    for p in range(prompts):
        prompt = rng.integers(0, vocab, 20 + 3 * p)
        for _ in range(each):
            answer = rng.integers(0, vocab, rng.integers(1, 9))
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            made.append((Document(tokens, (np.arange(len(tokens)) >= len(prompt)).astype(np.float32), str(len(made))),))
    return made


def said(model, sequences: list[list[PackUnit]]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the log-probs of each sample's answer, by its source, and the gradients of the sum of their squares."""
    batch = Batch.of(sequences, SEQ_LEN)
    logprobs = model(
        batch.tokens,
        batch.positions,
        batch.segments,
        lambda x, head: token_logprobs(x, head, batch.targets, batch.loss_weights),
    ).logprobs
    grads = torch.autograd.grad(
        logprobs.square().sum(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
    )
    kept = logprobs.detach()
    return {
        source: kept[(batch.segments == d) & (batch.loss_weights != 0)] for d, source in enumerate(batch.sources)
    }, [g for g in grads if g is not None]


def same_said(model, mine: list[list[PackUnit]], theirs: list[list[PackUnit]]) -> set[str]:
    """Assert that log-probs and gradients are the same; return the sources of the samples."""
    (ours, our_grads), (others, other_grads) = said(model, mine), said(model, theirs)
    assert ours.keys() == others.keys()
    for source, logprobs in others.items():
        assert (ours[source] - logprobs).abs().max() <= 1e-5 * logprobs.abs().max(), source
    for a, b in zip(our_grads, other_grads, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max() + 1e-9
    return set(others)


@pytest.mark.parametrize("model_type", SHARING)
def test_what_is_read_once_changes_nothing(model_type: str) -> None:
    model = model_of(model_type)
    units = answers(model.config.vocab)
    shared, alone = pack_shared(units, SEQ_LEN), pack_all(units, SEQ_LEN)
    assert max(s.prefix_length for sequence in shared for unit in sequence for s in unit) >= 19
    assert sum(len(s) for sequence in shared for a in sequence for s in a) < 0.6 * sum(len(a[0]) for a in units)
    assert same_said(model, shared, alone) == {str(i) for i in range(len(units))}


@pytest.mark.parametrize("model_type", SHARING)
def test_the_samples_of_a_conversation_share_what_was_said(model_type: str) -> None:
    """The samples are those of SFT with `data.share_prefixes`: each is the conversation up to a different turn."""
    model = model_of(model_type)
    rng = np.random.default_rng(1)
    text = rng.integers(0, model.config.vocab, 60).astype(np.int32)
    samples = []
    for i, n in enumerate((12, 25, 44, 60)):
        tokens = np.concatenate([text[:n], rng.integers(0, model.config.vocab, 5).astype(np.int32)])
        samples.append(Document(tokens, (np.arange(n + 5) >= n).astype(np.float32), str(i)))
    shared = prefix_groups(samples, SEQ_LEN)
    assert [[s.prefix_length for s in unit] for unit in shared] == [[0, 43, 24, 11]]
    same_said(model, [shared], [[(s,)] for s in samples])


@pytest.mark.parametrize("fault", ["another beginning", "one token too few", "from position 0"])
def test_a_wrong_beginning_is_seen(fault: str) -> None:
    """Negative control: a sample that continues another prefix has other log-probs, although its own tokens are the
    same."""
    model = model_of("llama")  # which has no window
    sequences = pack_shared(answers(model.config.vocab, prompts=2), SEQ_LEN)
    batch = Batch.of(sequences, SEQ_LEN)
    tokens, positions = batch.tokens.clone(), batch.positions.clone()
    prefix_lengths = [s.prefix_length for sequence in sequences for unit in sequence for s in unit]
    for d, n in enumerate(prefix_lengths):
        if n:
            positions[batch.segments == d] -= {"another beginning": 0, "one token too few": 1, "from position 0": n}[
                fault
            ]
        elif fault == "another beginning":
            own = (batch.segments == d) & (batch.positions < 15)
            tokens[own] = (tokens[own] + 1) % model.config.vocab

    def head_fn(x, head):
        return token_logprobs(x, head, batch.targets, batch.loss_weights).logprobs.detach()

    right, wrong = (
        model(batch.tokens, batch.positions, batch.segments, head_fn),
        model(tokens, positions, batch.segments, head_fn),
    )
    for d, n in enumerate(prefix_lengths):
        if n:
            assert (right - wrong)[batch.segments == d].abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss"])
def test_the_masks_of_a_gpu_see_the_same_beginnings(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention._flex)
    model = model_of(model_type)
    sequences = pack_shared(answers(model.config.vocab), SEQ_LEN)
    assert len(sequences) > 1
    assert any(len(sequence) > 1 for sequence in sequences), (
        "two families in a sequence: the masks must tell them apart"
    )
    batch = Batch.of(sequences, SEQ_LEN)
    raise_if_masks_differ(model, batch.tokens, batch.positions, batch.segments)


def test_a_document_that_goes_on_does_not_see_what_its_first_goes_on_with():
    """Two answers share a prompt. The first answer does not change the log-probs of the second, nor the second those
    of the first."""
    model = model_of("qwen3")
    (sequence,) = pack_shared(answers(model.config.vocab, prompts=1, each=2), SEQ_LEN)
    batch = Batch.of([sequence], SEQ_LEN)

    def loss(tokens):
        return model(
            tokens,
            batch.positions,
            batch.segments,
            lambda x, h: token_logprobs(x, h, batch.targets, batch.loss_weights),
        ).logprobs.detach()

    before = loss(batch.tokens)
    for one, other in ((0, 1), (1, 0)):
        own = (batch.segments == one) & (batch.loss_weights.roll(1, 1) != 0)  # the answer's own tokens
        moved = loss(torch.where(own, (batch.tokens + 1) % model.config.vocab, batch.tokens))
        assert torch.equal(before[batch.segments == other], moved[batch.segments == other])
        assert not torch.equal(before[batch.segments == one], moved[batch.segments == one]) or int(own.sum()) == 1


def test_a_shared_beginning_sends_its_gradient_from_all():
    model = model_of("qwen3")
    units = answers(model.config.vocab, prompts=1, each=3)
    found = []
    for sequences in (pack_shared(units, SEQ_LEN), pack_all(units, SEQ_LEN)):
        batch = Batch.of(sequences, SEQ_LEN)
        total = model(
            batch.tokens,
            batch.positions,
            batch.segments,
            lambda x, head, b=batch: cross_entropy(x, head, b.targets, b.loss_weights),
        )
        found.append(torch.autograd.grad(total, [model.embed.weight])[0])
    assert (found[0] - found[1]).abs().max() <= 2e-5 * found[1].abs().max()
