"""An online job as far as it is known before a role is started: what all of its parts are made from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ptf.compute import provenance
from ptf.compute.device_defaults import computes_on_gpu
from ptf.compute.world import CPU
from ptf.config import Job
from ptf.config.logprob_limits import LogprobLimits, logprob_limits
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.rollout import RolloutConfig
from ptf.config.transports import with_lora_sync
from ptf.data.sources.rows import fingerprints, first_lines, specs
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.data.trie import Trie
from ptf.errors import UserError
from ptf.events.catalogue import Catalogue
from ptf.model.backends import backend_of
from ptf.model.sampling import LogitsProcessing
from ptf.recipes import registry
from ptf.recipes.protocol import FrozenModelSpec, Recipe
from ptf.rl.cluster import RoleSpec
from ptf.rl.job_cluster import offload_path
from ptf.rl.prompts import FittingPrompts, held_out_prompts, training_prompts
from ptf.rl.rewards.model import RewardModel, raise_if_without_score
from ptf.rl.roles import Learner, LearnerSettings, LogprobModel, ModelSettings
from ptf.rl.rollout_role import raise_if_cut_responses, sampler_spec, trie_of, with_logits_processing
from ptf.rl.validate import affordable
from ptf.train.model_source import ModelSource, StartingModel, needs_weights


@dataclass(frozen=True)
class OnlineJob:
    """A job, and what is made of its config and its files."""

    job: Job  # with `rollout.lora_sync` settled
    rollout: RolloutConfig  # the section of the job, which an online job has
    run: Path
    recipe: Recipe
    start: StartingModel  # whose directory has weights
    tokenizer: Tokenizer
    prompts: FittingPrompts
    held_out: dict[str, list[Prompt]]  # for validation during training
    processing: LogitsProcessing
    trie: Trie | None  # the allowed responses; None: any
    limits: LogprobLimits
    made_with: dict[str, Any]  # the fingerprints that a resume compares

    @classmethod
    def of(cls, job: Job, run: Path) -> "OnlineJob":
        """Read what the job needs. Raises UserError for every problem that can be found without a role."""
        if job.rollout is None:
            raise UserError("an online recipe needs the section rollout; add it to the config")
        recipe = registry.build(job)
        start = StartingModel.of_job(job, run)
        tokenizer = start.load_tokenizer()
        prompts = training_prompts(job, tokenizer)
        if job.evaluate.ranking is not None:  # rewards read the catalogue too
            Catalogue.load(job.evaluate.ranking.catalogue).raise_if_different(tokenizer, "the model's")
        trie = trie_of(job.rollout, tokenizer)
        recipe, processing = with_logits_processing(recipe, job.rollout, trie)
        start = start.with_weights()
        held_out: dict[str, list[Prompt]] = {}
        if job.train.validate_every:
            held_out = held_out_prompts(job.evaluate.sources, tokenizer, job.evaluate.prompts)
            held_out, _ = affordable(held_out, job, start.directory, 1, samples=1)
        if trie is not None:
            lengths = [len(p.tokens) for prompts in held_out.values() for p in prompts]
            raise_if_cut_responses(trie, job, max(lengths, default=0))
        sizes = backend_of(job.model.backend).decoder_config(start.directory)
        if text := sizes.beyond(job.data.seq_len):
            print(f"a response's context of {text}", flush=True)
        experts = sizes.moe is not None
        job = with_lora_sync(job, computes_on_gpu(job.compute), experts)
        sources = specs(job.data.sources)
        print("\n".join(first_lines(sources)), flush=True)
        made_with = provenance.made_with(CPU, fingerprints(sources), tokenizer.identity["fingerprint"])
        if trie is not None:
            made_with["allowed"] = trie.fingerprint()
        return cls(
            job,
            cast("RolloutConfig", job.rollout),
            run,
            recipe,
            start,
            tokenizer,
            prompts,
            held_out,
            processing,
            trie,
            logprob_limits(job, experts=experts),
            made_with,
        )

    def roles(self) -> dict[str, RoleSpec]:
        """Return the roles of the job by name: policy, the recipe's frozen models, critic, reward model and rollout.

        A frozen model without a path is the one that the policy starts from. Raises UserError if its directory is
        missing, or its tokenizer is not the policy's.
        """
        job, start = self.job, self.start
        policy = LearnerSettings(
            directory=start.directory,
            section=start.section,
            train=job.train,
            seed=job.seed,
            seq_len=job.data.seq_len,
            processing=self.processing,
            recipe=self.recipe,
            tokenizer=start.tokenizer_path,
        )
        models: dict[str, tuple[type, ModelSettings]] = {"policy": (Learner, policy)}
        for role, frozen_model in self.recipe.frozen_models.items():
            if needs_weights(frozen_model, start.section):
                source = start.beside(frozen_model, role, job.verify_bytes)
                models[role] = LogprobModel, replace(policy, directory=source.directory, section=source.section)
        if (critic := self.recipe.critic) is not None:
            train = job.train.model_copy(update={"lr": critic.lr or job.train.lr})
            models["critic"] = Learner, replace(policy, train=train, recipe=critic)
        if self.rollout.reward_model:
            models["reward_model"] = RewardModel, self._reward_model()
        sizes, roles = job.compute.mesh.sizes(job.compute.workers), dict[str, RoleSpec]()
        for role, (cls, settings) in models.items():
            roles[role] = RoleSpec(role, cls, replace(settings, offload_path=offload_path(job, self.run, role)), sizes)
        roles["rollout"] = sampler_spec(
            job,
            start.directory,
            start.tokenizer_path,
            self.run,
            self.trie,
            engine=self.rollout.engine,
            length=job.data.seq_len,
            for_training=True,
        )
        return roles

    def _reward_model(self) -> ModelSettings:
        """Return the settings of the reward model. Raises UserError if it has no scalar head."""
        job, reward_model = self.job, self.rollout.reward_model
        assert reward_model is not None
        spec, key = FrozenModelSpec(reward_model.path, same_architecture=False), "rollout.reward_model.path"
        source = ModelSource.of(spec, key, ModelConfig(path=reward_model.path), verify_up_to=job.verify_bytes)
        raise_if_without_score(source.directory)
        return ModelSettings(
            directory=source.directory,
            section=source.section,
            train=job.train,
            seed=job.seed,
            # its tokenizer and template may give more tokens than the policy's
            seq_len=min(
                backend_of(source.section.backend).decoder_config(source.directory).max_positions, 2 * job.data.seq_len
            ),
        )
