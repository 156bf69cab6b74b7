"""Mutations of the package: small faults, each put into one line of its source, by which a suite of tests is judged
(DeMillo, Lipton and Sayward, "Hints on test data selection", 1978).

A seed orders the lines to which an operator applies by digests of what they say; the mutation of a number is that of
the line at this place, with an operator drawn uniformly among those that apply there, then a place of it. The same
source gives the same mutations, and a change of the source leaves those of all other lines as they are.
"""

import ast
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC = {ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Div(), ast.Div: ast.Mult()}
EXTREMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin"}
MESSAGES = {"print", "warn", "debug", "info", "warning", "error", "exception"}  # calls that write text for people
WITH_DEFAULTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NOT_MUTATED = (ast.JoinedStr, ast.Raise, ast.Assert)  # their parts; that something is raised at all is mutated


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file: the bytes from `start` to `end` become `text`."""

    file: str  # from the root of the repository
    operator: str
    line: int
    last_line: int
    start: int
    end: int
    text: str
    scope: tuple[int, int]  # first and last line of the innermost function, else class, else of the file

    def applied(self, source: bytes) -> bytes:
        """The source of the file with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def lines(self, source: bytes) -> tuple[str, str]:
        """The first changed line without its indentation, before and after the change."""
        before, after = source.decode().splitlines(), self.applied(source).decode().splitlines()
        first = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), self.line - 1)
        return before[first].strip(), after[first].strip()


class Finder:
    """All mutations of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.begins = [0]
        for row in source.splitlines(keepends=True):
            self.begins.append(self.begins[-1] + len(row))
        self.scope = (1, len(self.begins))
        self.found: list[Mutation] = []
        self.visit(ast.parse(source))

    def add(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        """Replace the node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.begins[node.lineno - 1] + node.col_offset
        end = self.begins[node.end_lineno - 1] + node.end_col_offset
        self.found.append(Mutation(self.file, operator, node.lineno, node.end_lineno, start, end, text, self.scope))

    def visit(self, node: ast.AST) -> None:
        """The node and all below it that is not left out."""
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            return
        kept = self.scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            self.scope = (first, node.end_lineno or node.lineno)
        self.mutate(node)
        for child in self.children(node):
            self.visit(child)
        self.scope = kept

    def children(self, node: ast.AST) -> Iterator[ast.AST]:
        """What may be mutated below: no annotation, message, docstring or list of names."""
        if isinstance(node, (*NOT_MUTATED, ast.Import, ast.ImportFrom, ast.arg)) or is_message(node):
            return
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in ("Literal", "Annotated"):
            return
        if isinstance(node, ast.AnnAssign):
            yield from filter(None, [node.target, node.value])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        else:
            yield from ast.iter_child_nodes(node)

    def mutate(self, node: ast.AST) -> None:
        """The mutations of this node itself."""
        for one in (self.comparison, self.arithmetic, self.boolean, self.constants, self.condition, self.deletion):
            one(node)
        for one in (self.returned, self.bounds, self.extremes, self.defaults):
            one(node)

    def comparison(self, node: ast.AST) -> None:
        """Another comparison at each operator of a chain."""
        if isinstance(node, ast.Compare):
            words = [ast.unparse(operand) for operand in (node.left, *node.comparators)]
            signs = [ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))[2:-2] for op in node.ops]
            for i, op in enumerate(node.ops):
                changed = [*signs[:i], COMPARISONS[type(op)], *signs[i + 1 :]]
                chain = " ".join(f"{sign} ({word})" for sign, word in zip(changed, words[1:], strict=True))
                self.add("comparison", node, f"(({words[0]}) {chain})")

    def arithmetic(self, node: ast.AST) -> None:
        """+ for -, * for /, and the reverse; not where a text is concatenated or repeated."""
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not (texts(node.left) or texts(node.right)):
            self.add(
                "arithmetic", node, f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)], node.right))})"
            )
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC and not texts(node.value):
            changed = ast.AugAssign(node.target, ARITHMETIC[type(node.op)], node.value)
            self.add("arithmetic", node, ast.unparse(ast.fix_missing_locations(changed)))

    def boolean(self, node: ast.AST) -> None:
        """And for or, the reverse, and a `not` that is dropped."""
        if isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            self.add("boolean", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.add("boolean", node, f"({ast.unparse(node.operand)})")

    def constants(self, node: ast.AST) -> None:
        """Another number or truth value; another text where it is a key or is compared."""
        for child in self.children(node):
            if not isinstance(child, ast.Constant) or isinstance(node, (ast.Slice, ast.Expr, *WITH_DEFAULTS)):
                continue
            is_key = (
                (isinstance(node, ast.Dict) and child in node.keys)
                or isinstance(node, ast.Compare)
                or (isinstance(node, ast.Subscript) and child is node.slice)
            )
            if not isinstance(child.value, str) or is_key:
                self.constant("constant", child)

    def constant(self, operator: str, node: ast.Constant) -> None:
        """One constant."""
        if isinstance(node.value, bool):
            self.add(operator, node, repr(not node.value))
        elif isinstance(node.value, int | float):
            self.add(operator, node, f"({node.value!r} + 1)")
        elif isinstance(node.value, str):
            self.add(operator, node, repr(node.value + "_"))

    def condition(self, node: ast.AST) -> None:
        """A condition is negated."""
        tests: list[ast.expr] = []
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        for test in tests:
            self.add("condition", test, f"(not ({ast.unparse(test)}))")

    def deletion(self, node: ast.AST) -> None:
        """A statement with an effect is deleted."""
        targets: Sequence[ast.expr] = ()
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            targets = [node.target]
        call = node.value if isinstance(node, ast.Expr) else None
        call = call.value if isinstance(call, ast.Await) else call
        if (
            any(isinstance(part, ast.Attribute) for target in targets for part in [*elements(target)])
            or (isinstance(call, ast.Call) and not is_message(call))
            or isinstance(node, ast.Raise)
        ):
            assert isinstance(node, ast.stmt)
            self.add("deletion", node, "pass")

    def returned(self, node: ast.AST) -> None:
        """None is returned in place of a value."""
        if (
            isinstance(node, ast.Return)
            and node.value is not None
            and not (isinstance(node.value, ast.Constant) and node.value.value is None)
        ):
            self.add("return", node, "return None")

    def bounds(self, node: ast.AST) -> None:
        """A bound of a slice is one more or one less."""
        if isinstance(node, ast.Slice):
            for bound in filter(None, (node.lower, node.upper)):
                for step in ("+", "-"):
                    self.add("slice", bound, f"({ast.unparse(bound)}) {step} 1")

    def extremes(self, node: ast.AST) -> None:
        """Minimum for maximum, and the reverse."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXTREMES:
            self.add("extreme", node.func, EXTREMES[node.func.id])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EXTREMES:
            self.add("extreme", node.func, f"({ast.unparse(node.func.value)}).{EXTREMES[node.func.attr]}")

    def defaults(self, node: ast.AST) -> None:
        """Another default of a parameter, or of a field of a class."""
        values: list[ast.expr | None] = []
        if isinstance(node, WITH_DEFAULTS):
            values = [*node.args.defaults, *node.args.kw_defaults]
        elif isinstance(node, ast.ClassDef):
            values = [child.value for child in node.body if isinstance(child, ast.AnnAssign)]
        for value in values:
            if isinstance(value, ast.Constant):
                self.constant("default", value)


def elements(target: ast.expr) -> Iterator[ast.expr]:
    """What an assignment assigns to."""
    yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def texts(node: ast.expr) -> bool:
    """Whether it is a text as it stands, or a list, which arithmetic only joins."""
    return isinstance(node, ast.JoinedStr | ast.List) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_message(node: ast.AST) -> bool:
    """Whether it is a call that writes a text for people."""
    if not isinstance(node, ast.Call):
        return False
    return (isinstance(node.func, ast.Name) and node.func.id in MESSAGES) or (
        isinstance(node.func, ast.Attribute) and node.func.attr in MESSAGES
    )


def is_change(mutation: Mutation, source: bytes) -> bool:
    """Whether it leaves valid Python, other than what was there."""
    try:
        changed = ast.parse(mutation.applied(source))
    except SyntaxError:  # an assignment expression that loses its parentheses, for one
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


class Drawing:
    """Draws mutations of all Python files of a package."""

    def __init__(self, root: Path, package: str) -> None:
        self.root = root
        self.lines: dict[str, dict[str, list[Mutation]]] = {}  # by file, text, and how often it stood above in the file
        for path in sorted((root / package).rglob("*.py")):
            file, source = path.relative_to(root).as_posix(), path.read_bytes()
            at: dict[int, dict[str, list[Mutation]]] = defaultdict(lambda: defaultdict(list))
            for mutation in Finder(file, source).found:
                at[mutation.line][mutation.operator].append(mutation)
            rows, seen = source.splitlines(), Counter[bytes]()
            for line in sorted(at):
                text = rows[line - 1].strip()
                self.lines[f"{file}\n{text.decode()}\n{seen[text]}"] = dict(at[line])
                seen[text] += 1

    def drawn(self, seed: int, count: int) -> dict[str, Mutation]:
        """The first mutations of a seed, by digests that stay as long as their lines do; lines whose mutation changes
        nothing are passed over."""
        found = dict[str, Mutation]()
        for digest, key in sorted((hashlib.sha256(f"{seed}\n{key}".encode()).hexdigest(), key) for key in self.lines):
            if len(found) == count:
                break
            rng, operators = random.Random(f"{seed}\n{key}"), self.lines[key]
            places = operators[sorted(operators)[rng.randrange(len(operators))]]
            mutation = places[rng.randrange(len(places))]
            if is_change(mutation, (self.root / mutation.file).read_bytes()):
                found[digest[:16]] = mutation
        return found
