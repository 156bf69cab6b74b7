"""A preview: episodes of an online job, played and scored as the run would, and what is found in them.

The episodes are played twice with the same seeds. What differs then would also differ when a run is resumed. Scripted
policies that answer nothing, or repeat the prompt, show whether such responses get a reward; their episodes come
first, so that the start of worker processes is not counted in the times.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ptf.compute.device_defaults import settled
from ptf.compute.launch import default_threads
from ptf.compute.world import World, joined
from ptf.config import Job, Plugin
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import NoResult, Prompt, Reward, Trajectory, documents_of
from ptf.episode_preview.player import EpisodeTimes, Played, Player
from ptf.episode_preview.policies import SCRIPTS, PreviewPolicy, policy_of, tokenizer_without_model
from ptf.episode_preview.report import Preview, PreviewEpisode, Probe, Turn
from ptf.errors import UserError
from ptf.inspection.report import spans
from ptf.rl.engine_settings import EngineSettings
from ptf.rl.engines.scripted import ScriptedEngine
from ptf.rl.prompts import training_prompts
from ptf.rl.rollout_role import raise_if_wrong_environments, rewards_of, sampler_spec, trie_of
from ptf.rl.sampler import Sampler, SamplerSettings
from ptf.train.model_source import StartingModel
from ptf.workspace import progress, scratch

MOST_PROBED = 8  # episodes that each scripted probe plays
PROBED = {"empty": "an empty response", "echo": "a response that repeats the last user message"}


def preview_job(job: Job, episodes: int, policy: str | None) -> Preview:
    """Play episodes of an online job. `policy` is as in `policy_of`.

    Raises UserError for a job that has no rollouts, has a reward model, or has data that cannot be read.
    """
    if job.rollout is None:
        raise UserError("ptf try plays the episodes of online jobs; this job has no section rollout")
    if job.rollout.reward_model is not None:
        raise UserError(
            "rollout.reward_model: ptf try does not load reward models; "
            "--set rollout.reward_model=null plays what else the job has"
        )
    chosen = policy_of(settled(job), policy)
    with scratch.directory(Path(job.output) / "try") as place, _sampler(chosen, place) as sampler:
        rewards = rewards_of(chosen.job, chosen.job.online_rollout.reward)
        try:
            with progress.stage("try"):
                return _tried(chosen, Player(chosen.job, sampler, rewards), episodes)
        finally:
            rewards.close()
            sampler.close()


@contextlib.contextmanager
def _sampler(chosen: PreviewPolicy, place: Path) -> Iterator[Sampler]:
    """Yield the sampler that plays the job's episodes; `place` is an empty directory."""
    job = chosen.job
    if chosen.script is None:
        starting = StartingModel.of_job(job, place)
        trie = trie_of(job.rollout, starting.load_tokenizer())
        model, tokenizer = starting.with_weights().directory, starting.tokenizer_path
        spec = sampler_spec(job, model, tokenizer, place, trie, engine="native", length=job.data.seq_len)
        with joined(
            job.compute.device, job.compute.timeout_s, threads=job.compute.threads or default_threads(1)
        ) as world:
            yield Sampler(world, spec.settings)
        return
    raise_if_wrong_environments(job.online_rollout)
    directory = str(place / "tokenizer")
    tokenizer_without_model(job).save(place / "tokenizer")
    engine = EngineSettings(
        kind=Plugin(use="ptf.episode_preview.preview_job:silent_engine"),
        directory=directory,
        version=0,
        seed=job.seed,
        precision="fp32",
        max_length=job.data.seq_len,
    )
    yield Sampler(
        World(),
        SamplerSettings(
            engine=engine, tokenizer=directory, rollout=job.online_rollout, timeout_s=job.compute.timeout_s
        ),
    )


def silent_engine(directory: str, **_: object) -> ScriptedEngine:
    """Return an engine that answers nothing, with the tokenizer of the directory; each play has its own script."""
    return ScriptedEngine(Tokenizer.load(directory), lambda seed, context: "")


def _tried(chosen: PreviewPolicy, player: Player, episodes: int) -> Preview:
    tokenizer = player.sampler.tokenizer
    stream = training_prompts(chosen.job, tokenizer)
    prompts = [next(stream) for _ in range(-(-episodes // player.per_prompt))]
    probed = min(episodes, max(MOST_PROBED, player.per_prompt))
    probes = [_probe(name, player, prompts, probed) for name in PROBED]
    player.take_retries()
    script = chosen.script and chosen.script(tokenizer)
    first = player.play(script, prompts, episodes, "the first play")
    retries = player.take_retries()
    second = player.play(script, prompts, episodes, "the second play")
    return Preview(
        policy=chosen.line,
        episodes=[_episode(t, first, i, tokenizer) for i, t in enumerate(first.trajectories)],
        seconds=first.seconds,
        scoring_seconds=first.scoring_seconds,
        differences=differences(first.trajectories, second.trajectories),
        probes=probes,
        counts=_counts(first.trajectories) | retries,
        warnings=[] if chosen.job.online_rollout.constrained_decoding else _rewarded(probes),
    )


def _probe(name: str, player: Player, prompts: Sequence[Prompt], episodes: int) -> Probe:
    script = SCRIPTS[name](player.sampler.tokenizer)
    outcomes = [t.outcome for t in player.play(script, prompts, episodes, f"the responses {name}").trajectories]
    rewards = [outcome.value for outcome in outcomes if isinstance(outcome, Reward)]
    return Probe(name, rewards, sum(isinstance(outcome, NoResult) for outcome in outcomes))


def _rewarded(probes: Sequence[Probe]) -> list[str]:
    """Return a warning for each probe with a reward above 0."""
    return [
        f"{PROBED[probe.name]} gets a reward above 0, which the policy may exploit: "
        f"{sum(r > 0 for r in probe.rewards)} of {len(probe.rewards) + probe.without_result} episodes, up to "
        f"{max(probe.rewards):g}"
        for probe in probes
        if max(probe.rewards, default=0) > 0
    ]


def differences(first: Sequence[Trajectory], second: Sequence[Trajectory]) -> list[str]:
    """Return a line for each episode of which two plays differ: the first thing that is different.

    An episode that has no result in either play is not trained on, and is not compared.
    """
    found = []
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        if isinstance(a.outcome, NoResult) and isinstance(b.outcome, NoResult):
            continue
        if (what := difference(a, b)) is not None:
            found.append(f"episode {number} ({a.prompt.source}, prompt {a.prompt.index}): {what}")
    return found


def difference(a: Trajectory, b: Trajectory) -> str | None:
    """Return the first difference between two plays of an episode, in words; None if they are the same."""
    for number, (one, other) in enumerate(zip(a.generations, b.generations, strict=False), 1):
        if not np.array_equal(one.context, other.context):
            return f"what the policy reads at call {number}"
        if not np.array_equal(one.sampled_ids, other.sampled_ids):
            return f"what the policy answers to the same text and seed, at call {number}"
    if len(a.generations) != len(b.generations):
        return f"the number of calls, {len(a.generations)} and {len(b.generations)}"
    if _outcome(a) != _outcome(b):
        return f"the reward, {_outcome(a)} and {_outcome(b)}"
    return None if a.text == b.text else "the text that is scored"


def _outcome(t: Trajectory) -> str:
    if isinstance(t.outcome, Reward):
        return f"{t.outcome.value!r}"
    return "none" if t.outcome is None else f"no result ({t.outcome.reason})"


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the sums over all episodes: of what they count, of their responses and tokens, and of those truncated at
    a limit, without those that have no result."""
    counts = {
        "responses": float(sum(len(t.generations) for t in trajectories)),
        "sampled_tokens": float(sum(t.num_sampled_tokens for t in trajectories)),
        "truncated": float(sum(not t.complete and not isinstance(t.outcome, NoResult) for t in trajectories)),
    }
    for t in trajectories:
        for name, value in t.counts.items():
            counts[name] = counts.get(name, 0.0) + float(value)
    return counts


def _episode(t: Trajectory, played: Played, number: int, tokenizer: Tokenizer) -> PreviewEpisode:
    times = played.times[number]
    return PreviewEpisode(
        prompt=t.prompt,
        reward=t.outcome.value if isinstance(t.outcome, Reward) else None,
        reason=t.outcome.reason if isinstance(t.outcome, NoResult) else None,
        complete=t.complete,
        seconds=times.ended - times.began,
        start_seconds=start_seconds(times),
        turns=turns_of(times),
        documents=[_pieces(d.tokens, d.positions, tokenizer) for d in documents_of(t.generations)],
        counts=dict(t.counts),
    )


def start_seconds(times: EpisodeTimes) -> float:
    """Return the seconds until the policy was asked first; of an episode that never asked, all of its seconds."""
    return min(times.asked.values(), default=times.ended) - times.began


def turns_of(times: EpisodeTimes) -> tuple[Turn, ...]:
    """Return the turns of an episode that has ended, in the order in which the policy was asked."""
    calls = sorted((moment, call) for call, moment in times.asked.items())
    turns = []
    for (asked, call), (end, _) in itertools.pairwise([*calls, (times.ended, -1)]):
        answered = times.answered.get(call, end)
        turns.append(Turn(answered - asked, max(0.0, end - answered)))  # calls may overlap
    return tuple(turns)


def _pieces(tokens: np.ndarray, positions: np.ndarray, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """Return a document's text in pieces of what was sampled, and of what was not."""
    sampled = np.zeros(len(tokens), bool)
    sampled[positions] = True
    return spans(tokens, sampled, tokenizer)
