"""Tasks of verifiers, played by the library's own harnesses and scored by its own rewards.

The library runs in an interpreter of its own, with uv, and calls the policy at the endpoint:

    data.prepare: {use: ptf.rl.environments.verifiers_agent:prepare, args: {python: P, env: {taskset: {id: NAME}}}}
    rollout.harness: {agent: {use: ptf.rl.environments.verifiers_agent:play, args: {env: …}}, python: P}

`env` is the configuration of an environment of verifiers 0.4; agents run as subprocesses unless it names another
runtime. That interpreter reads this file, which imports ptf only where ptf calls it.
"""

import asyncio
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NUMBERS, SERVED, LOADS_WITHIN_S = itertools.count(), list[Any](), 1800.0  # tasks may be downloaded
ROLE = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}  # a conversation with the tools of the task


def prepare(directory: str, *, python: str, env: Mapping[str, Any], train: int = 1000, test: int = 100) -> None:
    """Write `train.jsonl` and `test.jsonl`: a row for each of the first tasks, and of those after. Raises UserError."""
    from ptf.errors import UserError

    command = [python, __file__, json.dumps(env), str(train + test)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOADS_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"verifiers in {python}: no tasks within {LOADS_WITHIN_S:g} s") from error
    if done.returncode:
        raise UserError(f"verifiers in {python}: {(done.stderr.strip().splitlines() or ['no line of error'])[-1]}")
    rows = done.stdout.splitlines(keepends=True)
    if len(rows) <= train:
        raise UserError(f"the environment has {len(rows)} tasks: make `train`, {train}, smaller")
    for name, part in (("train", rows[:train]), ("test", rows[train:])):
        (Path(directory) / f"{name}.jsonl").write_text("".join(part))


def environment(configuration: str) -> Any:
    """Return the environment of a configuration."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import environment_class

    values = json.loads(configuration)
    kind = environment_class(values["taskset"]["id"], values.get("id", ""))
    config = concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.SingleAgentEnvConfig
    roles = [name for name, field in config.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    return kind(config(**{**values, **{name: {**ROLE, **values.get(name, {})} for name in roles}}))


@functools.cache
def served(configuration: str) -> "asyncio.Task[tuple[Any, Callable[[int], Any]]]":
    """Return what starts an environment, and gives it with a function that returns a task by its number."""

    async def start() -> tuple[Any, Callable[[int], Any]]:
        made, known = environment(configuration), list[Any]()
        SERVED.append(made.serving())  # until the process ends
        await SERVED[-1].__aenter__()
        all_of_them = iter(made.taskset)  # which may be infinite

        def task(number: int) -> Any:
            known.extend(itertools.islice(all_of_them, max(0, number + 1 - len(known))))
            return known[number]

        return made, task

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where uv is
    return asyncio.ensure_future(start())


async def play(row: Mapping[str, Any], base_url: str, api_key: str, seed: int, *, env: Mapping[str, Any]) -> float:
    """Play the row's task; return the sum of its agents' rewards. Raises RuntimeError for an episode that failed."""
    import verifiers.v1 as vf

    made, task = await asyncio.shield(served(json.dumps(env)))  # which others wait for, too
    name = f"PTF_API_KEY_{next(NUMBERS)}"  # verifiers keeps such variables from the agents' processes
    os.environ[name] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=name)
        episode = await made.run_episode(
            task(row["task"]), vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
        )
    finally:
        del os.environ[name]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors)[:500])
    return float(sum(trace.reward for trace in episode.traces))


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    for number, one in enumerate(itertools.islice(environment(sys.argv[1]).taskset, int(sys.argv[2]))):
        print(json.dumps({"messages": [{"role": "user", "content": one.data.prompt_text}], "task": number}))
