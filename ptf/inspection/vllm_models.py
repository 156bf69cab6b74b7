"""Whether vLLM serves a job's model rightly, where a config has it do so and the model is on this machine."""

from ptf.config import Job
from ptf.rl.engines.vllm_support import config_of, raise_if_wrong


def raise_if_vllm_is_wrong(job: Job) -> None:
    """Raise UserError if an engine of the job is vLLM, which does not serve its model rightly.

    A model that is not on this machine is judged when the job starts.
    """
    config = config_of(job.model.path)
    if job.rollout and job.rollout.engine == "vllm":
        raise_if_wrong("rollout.engine", config, job.train.precision, synced=job.rollout.lora_sync != "adapter")
    if job.evaluate.sources and job.evaluate.engine == "vllm":
        raise_if_wrong("evaluate.engine", config, job.train.precision, synced=False)
