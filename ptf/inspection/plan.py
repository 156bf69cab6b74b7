"""What `ptf plan` prints of a budget and of a roofline: tables for people, a dictionary for programs."""

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ptf.rl.online_budget import OnlineBudget, PoolBudget
from ptf.train.budget import GIB, Budget
from ptf.train.memory_search import Candidate
from ptf.train.roofline import Roofline

LARGEST_COSTS = 12  # operators that the table of the roofline shows


def as_json(plan: Budget | OnlineBudget, bound: Roofline | None) -> dict[str, object]:
    """Return the plan for programs: memory by phase, and the bound with its operators, the costliest first."""
    return _online_as_json(plan) if isinstance(plan, OnlineBudget) else _step_as_json(plan, bound)


def lines(plan: Budget | OnlineBudget, bound: Roofline | None) -> list[RenderableType]:
    """Return the tables of a plan and the sentences below them, in the order in which they are printed."""
    if isinstance(plan, OnlineBudget):
        return _online_lines(plan)
    return [*([_roofline_table(bound)] if bound else []), _budget_table(plan), *map(Text, _budget_lines(plan))]


def candidates_as_json(candidates: Sequence[Candidate]) -> dict[str, object]:
    """Return what `--fit` tried, the last one of which fits if any does; empty without candidates."""
    tried = [
        {
            "gpus": candidate.setting.gpus,
            "set": dict(candidate.setting.keys),
            "fits": candidate.fits,
            "why": why_not(candidate),
        }
        for candidate in candidates
    ]
    return {"tried": tried} if candidates else {}


def candidate_lines(candidates: Sequence[Candidate]) -> list[RenderableType]:
    """Return a line for each setting that `--fit` tried, and the arguments that make the job fit."""
    texts = [f"{candidate.setting}: {'fits' if candidate.fits else why_not(candidate)}" for candidate in candidates]
    if candidates and candidates[-1].fits:
        setting = candidates[-1].setting
        arguments = [f"--workers {setting.gpus}", *(f"--set {key}={value}" for key, value in setting.keys.items())]
        texts.append(f"Give {' '.join(arguments)}")
    elif candidates:
        texts.append("nothing that was tried fits")
    return [Text(text) for text in texts]


def why_not(candidate: Candidate) -> str:
    """Return why a setting does not fit; an empty text if it does."""
    if candidate.fits:
        return ""
    if isinstance(candidate.plan, OnlineBudget):
        return candidate.plan.problems[0]
    if isinstance(candidate.plan, Budget):
        memory = candidate.plan.memory
        return f"{memory.total / GIB:.1f} of {candidate.plan.room / GIB:.1f} GiB, of which {memory.largest} take most"
    return candidate.refused


def _step_as_json(step: Budget, bound: Roofline | None) -> dict[str, object]:
    memory = {name: getattr(step.memory, name) / GIB for name in step.memory.__slots__}
    found: dict[str, object] = {
        "memory_gib": {"step": {**memory, "total": step.memory.total / GIB}},
        **{"host_gib_per_worker": step.host / GIB, "checkpoint_host_gib_per_worker": step.copied / GIB},
        **{"fits": step.fits, "flops": step.flops, "tokens": step.tokens, "seconds": step.seconds},
    }
    if bound is not None:
        operators = [
            {"name": name, "seconds": seconds, "share": seconds / bound.seconds}
            for name, seconds in bound.operators.items()
        ]
        found |= {"mfu": bound.mfu, "seconds": bound.seconds, "operators": operators, "exposed_s": bound.exposed}
    return found


def _online_as_json(plan: OnlineBudget) -> dict[str, object]:
    """Return the plan of an online job for programs: memory by phase, of each role on its pool's fullest device."""
    phases = {
        phase: {"pool": pool.name, **{role: size / GIB for role, size in of.items()}, "total": pool.total(phase) / GIB}
        for pool in plan.pools
        for phase, of in pool.phases.items()
    }
    engine = {"weights_gib": plan.engine.weights / GIB, "cache_gib": plan.engine.cache / GIB}
    sync = {"transport": plan.transport, "gib": plan.sync.sent / GIB, "seconds": plan.sync.seconds}
    update = {"flops": plan.update.flops, "tokens": plan.update.tokens, "seconds": plan.update.seconds}
    return {
        "gpus": plan.gpus,
        "memory_gib": phases,
        "host_gib_per_worker": plan.host / GIB,
        "checkpoint_host_gib_per_worker": plan.copied / GIB,
        "engine": engine | {"responses": plan.engine.responses},
        "sync": sync,
        **update,
        "fits": plan.fits,
        "problems": list(plan.problems),
    }


def _online_lines(plan: OnlineBudget) -> list[RenderableType]:
    """Return the tables of an online job's plan and the sentences below them, in the order of printing."""
    engine, sync, update = plan.engine, plan.sync, plan.update
    texts = [
        f"GPUs in all pools: {plan.gpus}",
        (
            f"rollout: {engine.cache / GIB:.1f} GiB of keys and values on each device, beside "
            f"{engine.weights / GIB:.1f} GiB of weights: room for {engine.responses:,.0f} responses of data.seq_len "
            "tokens"
        ),
        (
            f"sync: {sync.sent / GIB:.2f} GiB by {plan.transport}, at least {sync.seconds:.2g} s; host memory for each "
            f"worker: {plan.host / GIB:.1f} GiB, and {plan.copied / GIB:.1f} GiB while a checkpoint is written"
        ),
        (
            f"update: {update.flops:.3g} FLOPs for {update.tokens:,} tokens, {update.seconds:.3g} s on "
            f"{update.mesh.ranks} GPUs ({update.mesh})"
        ),
        *_context_lines(update),
        *(f"does not fit: {problem}" for problem in plan.problems),
    ]
    return [
        Text(f"{update.model}: {update.parameters:,} parameters, {update.trained:,} trained"),
        *(_pool_table(pool, plan.room) for pool in plan.pools),
        *map(Text, texts),
    ]


def _pool_table(pool: PoolBudget, room: float) -> Table:
    table = Table(f"pool {pool.name}, {pool.devices} GPUs: phase", "GiB on each GPU", "of", box=SIMPLE)
    table.columns[1].justify = "right"
    for phase, of in pool.phases.items():
        total = pool.total(phase)
        parts = ", ".join(f"{role} {size / GIB:.2f}" for role, size in of.items())
        table.add_row(phase, f"{total / GIB:.2f} of {room / GIB:.2f}", parts, style="red" if total > room else None)
    return table


def _roofline_table(bound: Roofline) -> Table:
    """Return the upper bound of MFU, and the operators that take most of the step."""
    table = Table("operator", "seconds", "share of the step", box=SIMPLE)
    table.title = Text(f"MFU at most {bound.mfu:.1%}: at least {bound.seconds:.3g} s a step on each GPU")
    for column in table.columns[1:]:
        column.justify = "right"
    shown = list(bound.operators.items())[:LARGEST_COSTS]
    rest = bound.seconds - bound.exposed - sum(seconds for _, seconds in shown)
    for name, seconds in [*shown, ("all others", rest), ("collectives that nothing hides", bound.exposed)]:
        table.add_row(name, f"{seconds:.3g}", f"{seconds / bound.seconds:.1%}")
    return table


def _budget_table(step: Budget) -> Table:
    def gib(n):
        return f"{n / GIB:.2f}"

    memory = step.memory
    lines = {
        "weights (fp32 shard)": memory.weights,
        "gradients (fp32 shard)": memory.gradients,
        "optimizer (AdamW), on the GPU": memory.optimizer,
        "gathered blocks": memory.gathered,
        f"activations ({step.micro_batch_sequences} sequences at a time)": memory.activations,
        "logits and head": memory.logits,
    }
    table = Table("GiB on each GPU", "", box=SIMPLE)
    table.title = Text(f"{step.model}: {step.parameters:,} parameters, {step.trained:,} trained")
    table.columns[1].justify = "right"
    for name, value in lines.items():
        table.add_row(name, gib(value))
    table.add_section()
    table.add_row("total", f"{gib(memory.total)} of {gib(step.room)}", style=None if step.fits else "red")
    if step.host:
        table.add_row("host memory of what is offloaded, each worker", gib(step.host))
    table.add_row("host memory while a checkpoint is written, each worker", gib(step.copied))
    return table


def _budget_lines(step: Budget) -> list[str]:
    lines = [
        (
            f"{step.mesh.ranks} GPUs ({step.mesh}): {step.flops:.3g} FLOPs and {step.tokens:,} tokens per step; "
            f"{step.seconds:.3g} s, {step.tokens / step.seconds:,.0f} tokens/s"
        )
    ]
    if not step.fits:
        lines.append(f"does not fit: {step.memory.largest} take most; --fit finds what to change")
    return lines + _context_lines(step)


def _context_lines(step: Budget) -> list[str]:
    """Return what to know of a mesh that divides sequences."""
    if step.mesh.context == 1:
        return []
    return [
        "compute.mesh.context_parallel_size is only for documents that do not fit a GPU: packed short rows train "
        "faster as more, shorter sequences"
    ]
