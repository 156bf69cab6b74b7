"""What ptf makes of the forms in which people's data sets come: benchmarks/results/formats.md, from the table that the
tests assert (tests/data/dataset_forms.py).

    python benchmarks/formats.py
"""

import json
import sys
import tempfile
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ptf.errors import UserError  # noqa: E402
from tests.data.dataset_forms import FORMS, Form  # noqa: E402
from tests.data.read_form import RECIPES, not_read, read, tokenizer, trained, write  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "formats.md"
RECIPE = {
    "sft": "sft",
    "dpo": "dpo",
    "rm": "rm",
    "rm binary": "rm, loss_type: binary",
    "rm regression": "rm, loss_type: regression",
    "grpo": "grpo",
}
HEAD = """# Forms of data sets

Every form is made in small, one row, and read as a run reads it, from JSON lines and from parquet. \
"Trained" is the text that counts, of each sample (of a
pair: of the chosen answer and of the rejected one); `<end>` is the token that ends a turn. \
What is refused names the key that decides.
`tests/data/test_forms.py` holds every line of this page against the ids and weights of the plain row beside it.

    python benchmarks/formats.py      writes this page; there is nothing in it that depends on the machine
"""


def page() -> str:
    parts = [HEAD]
    with tempfile.TemporaryDirectory() as scratch:
        reader = tokenizer(Path(scratch) / "tokenizer")
        for sets, forms in groupby(FORMS, lambda form: form.sets):
            parts += [f"## {sets}\n", *(shown(form, reader, Path(scratch)) for form in forms)]
    return "\n".join(parts)


def shown(form: Form, reader, scratch: Path) -> str:
    """One row, what the config says of it, and what happens."""
    path = scratch / "rows.jsonl"
    write([form.row], path)
    keys = {"kind": form.kind} if form.kind != "auto" else {}
    keys |= (
        {"columns": "{" + ", ".join(f"{ours}: {there or 'null'}" for ours, there in form.columns.items()) + "}"}
        if form.columns
        else {}
    )
    config = ", ".join(f"`{key}: {value}`" for key, value in keys.items())
    lines = [
        f"* `{json.dumps(form.row, ensure_ascii=False)}`",
        f"  - recipe `{RECIPE[form.recipe]}`" + (f", source with {config}" if config else ""),
    ]
    try:
        (found,) = read(form, path, reader)
    except UserError as refusal:
        said = str(refusal).removeprefix(f"{path}:1 (source set): ")
        return "\n".join([*lines, f"  - **refused**: {said}", ""])
    what = json.dumps(form.plain, ensure_ascii=False)
    lines.append(f"  - **read** as `{what}`" + (f" ({form.note})" if form.note else ""))
    if form.recipe in RECIPES:
        weights = "" if set(form.weights) == {1.0} else f", with weight {' and '.join(f'{w:g}' for w in form.weights)}"
        lines.append(
            "  - trained: "
            + " / ".join(f"`{json.dumps(text, ensure_ascii=False)[1:-1]}`" for text in trained([found], reader))
            + weights
        )
    if unread := not_read(form, path):
        lines.append(
            "  - columns that nothing reads, which the run's first lines list: "
            + ", ".join(f"`{name}`" for name in unread)
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(FORMS)} rows")
