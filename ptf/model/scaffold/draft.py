"""The draft of a family's file: what is found, put together, and tried."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from ptf.model.scaffold import nearest, registration
from ptf.model.scaffold.check import check
from ptf.model.scaffold.effects import effects
from ptf.model.scaffold.reference import Reference, pattern, patterns, reference_of
from ptf.model.scaffold.report import Findings, Unmapped
from ptf.model.scaffold.settings import Settings, settings_of
from ptf.model.scaffold.skeleton import Skeleton
from ptf.model.scaffold.structure import Structure, measure
from ptf.model.scaffold.tensors import TensorPlan, mapping_lines, optional_tensors, tensor_plan


@dataclass(frozen=True, slots=True)
class Draft:
    """The text of a family's file, and the report about it."""

    reference: Reference
    text: str
    findings: Findings


def draft(reference: Reference, file: Path | None = None) -> Draft:
    """Draft the file of a family."""
    structure = measure(reference)
    plan = tensor_plan(reference, structure)
    optional = dict(optional_tensors(reference, structure))
    settings = settings_of(reference, structure, plan, optional)
    family = nearest.nearest_family(reference, {name for _, ours, _ in plan.found for name in ours})
    settings.reasons += _reasons(reference, structure, plan)
    more = {theirs: ours for found in optional.values() for theirs, ours in found.items() if ours}
    mappings, names = mapping_lines(plan, more)
    skeleton = Skeleton(reference, settings, tuple(mappings), frozenset(names), family, transformers.__version__)
    chosen = _chosen(reference, skeleton, settings)
    if chosen.get("scores") == '"sigmoid"' and nearest.has(reference, "load_balancing_loss_func"):
        settings.reasons.append(
            "experts scored by a sigmoid with transformers' load-balancing loss of softmax probabilities; ptf's "
            "loss is of the sigmoids (ptf/model/moe.py), so its gradient may differ"
        )
    findings = Findings(
        reference.model_type,
        str(file or registration.place_of(reference.model_type)),
        nearest=family,
        mapped={theirs: ", ".join(ours) for _, ours, theirs in plan.found} | more,
        unmapped=_unmapped(reference, plan, optional),
        reasons=settings.reasons,
        settings={**settings.fields, **{f"moe.{k}": v for k, v in settings.moe.items()}},
        unread=_unread(reference, settings),
        derived=settings.derived,
        chosen=chosen,
        differences=list(nearest.differences(reference, family)),
    )
    return Draft(reference, skeleton.text(chosen), findings)


def write_draft(name_or_directory: str, output: str | None = None, force: bool = False) -> Draft:
    """Draft a family, write its file, and add it to MODULES if it lies among the families. Raise UserError if there is
    such a file already, or a family of this name in another one."""
    reference = reference_of(name_or_directory)
    name = reference.model_type
    file = Path(output) if output else registration.place_of(name)
    registration.raise_if_taken(name, file, force)
    made = draft(reference, file)
    file.write_text(made.text)
    if registration.is_family(file):
        registration.register(name, file)
        made.findings.registered = True
    return made


def _reasons(reference: Reference, structure: Structure, plan: TensorPlan) -> Iterator[str]:
    """Yield what the structure shows that ptf does not have."""
    if structure.parallel:
        yield "attention and MLP read the same input (a parallel residual); ptf's layers compute one after the other"
    if not structure.rms:
        yield "norms with a mean or a bias (LayerNorm); ptf has RMSNorm"
    if not structure.norms or not plan.has("norm.weight"):
        yield "norms without weights, or norms that are no modules of the layer; ptf's have weights"
    if plan.has("mlp.up_proj.weight") and not plan.has("mlp.gate_proj.weight"):
        yield "an MLP without a gate (up, activation, down); ptf's MLP is gated (`MLP` in ptf/model/layers.py)"
    if nearest.rotates_pairs(reference) and not plan.has("attn.kv_a_proj.weight"):
        yield "rotary positions of neighbouring pairs of dimensions (0::2 with 1::2); ptf rotates halves"
    if nearest.norms_after_rotation(reference):
        yield "queries and keys are normalised after the rotation; ptf's qk_norm is before it"
    if reference.square:
        yield (
            "heads of another size than hidden_size / num_attention_heads do not run in transformers; random_config "
            "draws none"
        )
    for what in structure.missed:
        yield f"not measured: {what}"


def _unmapped(reference: Reference, plan: TensorPlan, optional: dict[str, dict[str, str]]) -> list[Unmapped]:
    """Return the tensors without a mapping, and the class of the module that holds each."""
    modules = {pattern(f"{name}."): type(module).__name__ for name, module in reference.model.named_modules()}

    def holder(name: str) -> str:
        while "." in name:
            name = name.rpartition(".")[0]
            if found := modules.get(f"{name}.") or modules.get(name):
                return found
        return type(reference.model).__name__

    lost = [Unmapped(name, shape, holder(name)) for name, shape in plan.unmapped.items()]
    here = patterns(reference.shapes)
    for key, found in optional.items():
        lost += [
            Unmapped(f"{name} (with another {key})", (), holder(name))
            for name, ours in found.items()
            if not ours and name not in here
        ]
    return lost


def _unread(reference: Reference, settings: Settings) -> dict[str, str]:
    """Return for each setting that is not read the values that are accepted, and what others do."""
    listed = [key for key in settings.refused if key in reference.defaults and key not in settings.read]
    found = effects(reference, (*settings.unread, *listed))
    told = {}
    for key, what in found.items():
        values = settings.unread.get(key)
        accepted = _listed(values) if values else "one kind of layer only"
        told[key] = f"{accepted} (another: {what}{_absent(reference, key, values)})"
    for key, values in settings.rule.items():
        told[key] = f"{_listed(values)} (counts only without layer_types{_absent(reference, key, values)})"
    return told


def _listed(values: list[Any]) -> str:
    return " or ".join(map(repr, values))


def _absent(reference: Reference, key: str, values: list[Any] | None) -> str:
    """Return what a config.json without the key has, if that is refused."""
    default = reference.defaults[key]
    return "" if values is None or default in values else f"; without the key it is {default!r}, which is refused"


def _chosen(reference: Reference, skeleton: Skeleton, settings: Settings) -> dict[str, str]:
    """Return the first combination of what can only be tried with which the model agrees, or the first one."""
    names = list(settings.choices)
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*settings.choices.values())]
    if not names:
        return {}
    count = 8 if settings.null_window else 3  # of 8, some have no window
    for chosen in combinations:
        if check(reference, skeleton.text(chosen), count, until_failure=True).passed:
            return chosen
    return combinations[0]
