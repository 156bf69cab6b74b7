"""The section `data`: the sources, their mixture, and how rows become tokens."""

from typing import Annotated, Literal

from pydantic import Field

from ptf.config.section import DATE, TRAIN_ON, Count, Fraction, Plugin, Positive, PositiveFloat, Section

# How full sequences are by look-ahead: the last table of benchmarks/results/packing.md.
LONG_SEQUENCE, LOOKAHEAD_OF_LONG, LOOKAHEAD = 16_384, 256, 64


class Source(Section):
    """One dataset: jsonl or csv (plain, `.gz`, `.zst`), json, parquet, arrow or feather files,
    or what `datasets` saved to disk."""

    path: str
    """File, directory, glob or URI; `prepare:NAME`; or a dataset of the Hugging Face Hub: `owner/name`, or
    `hf://datasets/owner/name` if a local directory has the same name, both with or without `@` and a branch, tag or
    commit; a run uses the commit that it began with until its end. Where there are several configs (names in the
    header of a README, or else folders) or splits, the path ends with the choice: `PATH:config`, `PATH:config:split`
    or `PATH::split`; the split `a+b` takes two."""
    kind: Literal["auto", "chat", "completion", "scored", "text", "events", "preference", "prompt", "tokenized"] = (
        "auto"
    )
    """What the rows are: the table of kinds in docs/data.md has their columns. `auto`: what the columns of the first
    row imply; in online recipes, prompts. `tokenized`: written by the tokenize stage. A row's `weight` multiplies the
    weight of its tokens, of its pair or of its score."""
    columns: dict[str, str | None] = {}
    """ptf's name of a column → its name in the files (`{messages: dialogue}`), or null if the column is not to be used
    (`{label: null}`)."""
    sampling_weight: PositiveFloat | None = None
    """Share in the mixture, relative to the other sources; a source without one counts 1. If no source has one, every
    row is read once per epoch: sources are interleaved in proportion to their numbers of rows, and each ends after its
    epochs. It does not change the loss of a row; the column `weight` of a row does."""
    row_count: Positive | None = None
    """The number of rows that the files have; it limits nothing (`limit` does). Give it only if an error asks for it.
    It stands in for the count of files whose rows ptf can count only by reading them (compressed files, lines in an
    object store), and there it may be approximate. If ptf counts the files itself, a different number is an error."""
    limit: Positive | None = None
    """Maximum number of rows that are used: the first ones in the order of the files."""
    epochs: Positive | None = None
    """Number of passes over the source after which it is exhausted. Default: `train.epochs`; if neither is set, the
    source is never exhausted."""


class MixConfig(Section):
    """How several sources make one stream."""

    by: Literal["samples", "tokens"] = "samples"
    """Whether the sampling weights of sources are shares of the samples or of the tokens."""
    temperature: PositiveFloat = 1.0
    """With sampling weights, shares are proportional to sampling_weight^(1 / temperature); if no source has one, to
    rows^(1 / temperature). A temperature above 1 makes the shares more equal."""
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"
    """With sampling weights: what happens when a source has completed its epochs. `repeat`: it starts again, until all
    sources have completed theirs. `drop`: the others continue without it. `stop`: the run ends. Without sampling
    weights, `drop` always applies."""


class DataConfig(Section):
    """What is read, and how it becomes sequences of tokens."""

    sources: dict[str, Source] = Field(min_length=1)
    """Training data by name."""
    validation: dict[str, Source] = {}
    """Held-out data of offline recipes. Its loss is measured in the evaluate stage and, while training, every
    `train.validate_every` steps (by default never). Online recipes have `evaluate.sources`."""
    prepare: Plugin | None = None
    """Function that makes data, a tokenizer or a model config before all other stages: called as `f(directory,
    **args)`."""
    partitions: Positive = 8
    """Number of disjoint streams into which the data of an epoch are divided, each shuffled and packed separately; a
    multiple of the number of data-parallel ranks (`compute.workers` divided by the tensor-parallel and the
    context-parallel size). Batches depend on the number of partitions, not on the number of workers."""
    seq_len: Positive = 2048
    """Tokens in one packed sequence; no sample may be longer."""
    shuffle_buffer: Count = 1024
    """About the least number of consecutive rows of a partition that are permuted together. They are those of whole
    blocks (row groups of parquet, 1 MiB of lines), which are permuted in each epoch. Of compressed files, which are
    permuted as whole files, they are just so many. 0 keeps the order of the files."""
    mix: MixConfig = MixConfig()
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What to do with a sample longer than `seq_len`; what was dropped or cut is counted.
    `split` makes documents of its pieces."""
    train_on: Annotated[str, Field(pattern=TRAIN_ON)] = "assistant"
    """Which tokens of a chat are trained. `assistant`: all turns of the assistant; `last`: the last of them; `all`:
    every token; `field:NAME`: each turn of the assistant with the weight in its key NAME (true, false or a number)."""
    share_prefixes: bool = False
    """Compute the common beginning of a conversation's samples once, as rollouts do for the responses to one prompt
    (recipe sft). It saves computation with templates that make every turn a sample of its own, which `ptf inspect`
    reports as *expansion*; losses are the same except for rounding."""
    response_rendering: Literal["template", "append"] = "template"
    """How the trained text of a response is built. `template`: as the chat template writes it; a response is refused if
    that text does not continue the generation prompt, for example where the template drops the thinking of earlier
    responses. `append`: in that case the thinking and the content are appended to the generation prompt, as a
    served model would generate them (for templates like those of DeepSeek-R1 and QwQ)."""
    omitted_context: Literal["error", "allow"] = "error"
    """Whether a chat template may leave out context: tools, their results, developer and system messages,
    earlier responses."""
    consecutive_turns: Literal["error", "join", "keep"] = "error"
    """What two messages of the assistant in a row are, as traces of agents have them. `error`: such a row is refused;
    `join`: one turn, their texts with a blank line between them; `keep`: two turns, each of which ends by itself. A
    tool call that is a message of its own (role `tool_call`) always belongs to the turn before it."""
    date: Annotated[str, Field(pattern=DATE)] | None = None
    """The date (YYYY-MM-DD) given to chat templates that render today's date. Default: the day on which the run
    began."""
    max_bad_rows_share: Fraction = 0.0
    """Largest share of the rows read from a source that may be skipped because they cannot be encoded; above it the run
    stops. A skipped row's location and the reason are written to `quarantine`. 0: the first such row stops the run.
    Until 1,000 rows have been read, up to `max_bad_rows_share` × 1,000 rows may be skipped, so that a few bad rows at
    the beginning do not end the run. While training, each partition counts the rows that it reads itself."""
    pretokenize: bool = True
    """In a flow: tokenize once to parquet, before training. Otherwise rows are tokenized while training."""

    @property
    def packing_lookahead(self) -> int:
        """Number of samples that the packer of a partition may choose from to fill a sequence: more where two or three
        long samples seldom fill one, and fewer for short sequences, those of trials with few rows (a sample may wait
        for as many others)."""
        return LOOKAHEAD_OF_LONG if self.seq_len >= LONG_SEQUENCE else max(1, min(LOOKAHEAD, self.seq_len // 8))
