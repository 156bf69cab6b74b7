"""What `ptf plan` prints of a budget and of a roofline: tables for people, a dictionary for programs."""

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ptf.train.budget import Budget
from ptf.train.roofline import Roofline

LARGEST_COSTS = 12  # operators that the table of the roofline shows


def as_json(step: Budget, bound: Roofline | None) -> dict[str, object]:
    """Return the plan for programs: memory by phase, and the bound with its operators, the costliest first."""
    memory = {name: getattr(step.memory, name) / 2**30 for name in step.memory.__slots__}
    found: dict[str, object] = {"memory_gib": {"step": {**memory, "total": step.memory.total / 2**30}}}
    found |= {"fits": step.fits, "flops": step.flops, "tokens": step.tokens, "seconds": step.seconds}
    if bound is not None:
        operators = [
            {"name": name, "seconds": seconds, "share": seconds / bound.seconds}
            for name, seconds in bound.operators.items()
        ]
        found |= {"mfu": bound.mfu, "seconds": bound.seconds, "operators": operators, "exposed_s": bound.exposed}
    return found


def lines(step: Budget, bound: Roofline | None) -> list[RenderableType]:
    """Return the tables of a plan and the sentences below them, in the order in which they are printed."""
    above = [] if bound is None else [_roofline_table(bound)]
    return [*above, _budget_table(step), *map(Text, _budget_advice(step))]


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
    """Return the memory of the fullest GPU, line by line."""

    def gib(n):
        return f"{n / 2**30:.2f}"

    memory = step.memory
    lines = {
        "weights (fp32 shard)": memory.weights,
        "gradients (fp32 shard)": memory.gradients,
        "optimizer (AdamW)": memory.optimizer,
        "gathered blocks": memory.gathered,
        f"activations ({step.micro_sequences} sequences at a time)": memory.activations,
        "logits and head": memory.logits,
    }
    table = Table("GiB on each GPU", "", box=SIMPLE)
    table.title = Text(f"{step.model}: {step.parameters:,} parameters, {step.trained:,} trained")
    table.columns[1].justify = "right"
    for name, value in lines.items():
        table.add_row(name, gib(value))
    table.add_section()
    table.add_row("total", f"{gib(memory.total)} of {gib(step.room)}", style=None if step.fits else "red")
    return table


def _budget_advice(step: Budget) -> list[str]:
    """Return what a step costs, and, if it does not fit, what takes most and what to change."""
    mesh = " × ".join(f"{name} {size}" for name, size in step.mesh.items())
    rate = step.tokens / step.seconds
    lines = [
        (
            f"{step.gpus} GPUs ({mesh}): {step.flops:.3g} FLOPs and {step.tokens:,} tokens a step; "
            f"{step.seconds:.3g} s, {rate:,.0f} tokens/s"
        )
    ]
    if not step.fits:
        lines.append(f"does not fit: {step.memory.largest} take most. Change:")
        lines += [f"  {what}  → {total / 2**30:.2f} GiB" for what, total in step.advice]
    return lines
