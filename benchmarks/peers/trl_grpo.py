"""TRL's GRPO step, timed: the peer of benchmarks/grpo_step.py, run by the Python of an environment of its own
(requirements-peers.txt).

Reads one JSON object from the command line: model directory (with its tokenizer), texts, lengths of each step's
responses, how many of them there are, are in a group and in a pass, steps, warm-up, dtype, learning rate, attention,
cache, the settings of transformers' continuous batching (null: without), and for agents the turns and the observations;
prints one JSON line: CPU-seconds and sampled tokens of the timed steps, and the tokens of all contexts; or with what
words transformers refuses a cache.
Every response ends at its length, with the end-of-turn token where the batch is not continuous.
"""

import json
import sys
import tempfile
import time
import traceback

import torch
from datasets import Dataset
from sft_cell import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback, logging
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """CPU-seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends, self.logs = [], []

    def on_step_end(self, args, state, control, **more) -> None:
        self.ends.append(time.process_time())

    def on_log(self, args, state, control, logs=None, **more) -> None:
        self.logs.append(logs)


class Ends(LogitsProcessor):
    """Ends every response at its length."""

    def __init__(self, lengths: list[int], prompt: int, end: int) -> None:
        self.lengths, self.prompt, self.end = torch.tensor(lengths), prompt, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids.shape[1] - self.prompt + 1 >= self.lengths
        scores[:, self.end] = float("-inf")
        scores[last] = float("-inf")
        scores[last, self.end] = 0.0
        return scores


CONTEXTS: list[int] = []  # tokens of the contexts that were generated from


def limit(model, lengths: list[list[int]]) -> None:
    """Let each call of `generate` end its responses at the next step's lengths."""
    generate, of_steps = model.generate, iter(lengths)

    def limited(*more, **named):
        CONTEXTS.append(int(named["attention_mask"].sum()))
        ends = Ends(next(of_steps), named["input_ids"].shape[1], model.config.eos_token_id)
        return generate(*more, **named, logits_processor=[ends])

    model.generate = limited


def limit_continuous(lengths: list[list[int]]) -> None:
    """Let each call of `generate_batch`, which makes a manager, end its responses at the next step's lengths."""
    begin, add, of_steps = ContinuousBatchingManager.__init__, ContinuousBatchingManager.add_request, iter(lengths)

    def begun(self, *more, **named):
        begin(self, *more, **named)
        self.lengths = next(of_steps)

    def added(self, input_ids, request_id=None, max_new_tokens=None, **named):
        CONTEXTS.append(len(input_ids))
        number = int(request_id.removeprefix("req_"))  # requests may be added in another order
        named["eos_token_id"] = -1  # none
        return add(self, input_ids, request_id, self.lengths[number], **named)

    ContinuousBatchingManager.__init__ = begun
    ContinuousBatchingManager.add_request = added


class Agents:
    """A rollout function: turns of a length, with the environment's words after each but the last."""

    def __init__(self, turns: int, said: int, observations: list[str], tokenizer) -> None:
        self.turns, self.said = turns, said
        self.observations = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in observations]

    def __call__(self, prompts, trainer):
        starts = [trainer.processing_class(text)["input_ids"] for text in prompts]
        ids, mask = [[] for _ in starts], [[] for _ in starts]
        for turn in range(self.turns):
            contexts = [start + more for start, more in zip(starts, ids, strict=True)]
            turns, _ = trainer._generate_single_turn(contexts, None, {}, 1)
            for i, said in enumerate(turns):
                seen = self.observations[i] if turn + 1 < self.turns else []
                ids[i] += [*said, *seen]
                mask[i] += [1] * len(said) + [0] * len(seen)
        return {"prompt_ids": starts, "completion_ids": ids, "logprobs": None, "env_mask": mask}


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(given["seed"])
    dtype = torch.bfloat16 if given["dtype"] == "bf16" and given["weights"] == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype, attn_implementation=given["attention"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    model.config.eos_token_id = tokenizer.eos_token_id
    agents = given["turns"] and Agents(*given["turns"], given["observations"], tokenizer)
    if agents:
        steps = given["steps"] + given["warmup"]
        limit(model, [[agents.said] * given["responses"]] * steps * agents.turns)
    elif given["continuous"] is not None:
        limit_continuous(given["lengths"])
    else:
        limit(model, given["lengths"])
    clock, seen = Clock(), []

    def reward(completions, completion_ids, **more):
        observed = sum(map(len, agents.observations)) * (agents.turns - 1) if agents else 0
        seen.append([sum(map(len, completion_ids)) - observed])
        return [float(sum(ids) % 7) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as out:
        uncompiled = given | {"compile": False, "liger": False}
        args = GRPOConfig(
            **arguments(uncompiled, out, given["responses"] * given["written"]),
            num_generations=given["group"],
            max_completion_length=max(map(max, given["lengths"])) * (2 if agents else 1),
            beta=0.0,
            temperature=1.0,
            cache_implementation=given["cache"],
            use_transformers_continuous_batching=given["continuous"] is not None,
            transformers_continuous_batching_config=given["continuous"],
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": given["texts"]}),
            processing_class=tokenizer,
            callbacks=[clock],
            rollout_func=agents or None,
        )
        try:
            trainer.train()
        except RuntimeError as error:
            if not given["cache"]:
                raise
            traceback.print_exc()
            print(json.dumps({"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}))
            return
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)][-given["steps"] :]
    sampled = [sum(one) for one in seen][-given["steps"] :]
    print(json.dumps({"cpu_s": steps, "tokens": sampled, "contexts": sum(CONTEXTS)}))


if __name__ == "__main__":
    main()
