"""Edits for half weights: float32 weights under autocast, norms alone in float32, or a lower beta2."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from ampdbg.patch.file_edits import FileEdit, lines_title
from ampdbg.probes.half_weights import CastLine, LoopLines, document_of
from ampdbg.quantities import listed
from ampdbg.source.document import Document
from ampdbg.source.edits import Edit, Fix, applied, below, indented, is_movable, replaced, with_keyword
from ampdbg.source.expressions import argument, method
from ampdbg.source.source_file import read_source

ARGUMENTS = r"transformers\..*TrainingArguments|trl\.(\w+\.)*(SFT|DPO|GRPO|KTO|ORPO|Reward)Config"

Rows = Sequence[tuple[str, str, str]]
"""Arguments for library calls: a regex for the callee's qualified name, a keyword and its value."""

AUTOCAST: Rows = (
    (r"accelerate\..*Accelerator", "mixed_precision", '"bf16"'),
    (ARGUMENTS, "bf16", "True"),
    (r"(pytorch_)?lightning\..*(Trainer|Fabric)", "precision", '"bf16-mixed"'),
)
BETA2: Rows = ((r"torch\.optim\..*Adam\w*", "betas", "(0.9, 0.95)"), (ARGUMENTS, "adam_beta2", "0.95"))

LOADERS = ("from_pretrained", "from_config")
"""Methods that load a model in its checkpoint's dtype by default."""

IN_BFLOAT16 = 'with torch.autocast("{}", dtype=torch.bfloat16):'

OFF = "by hand: the model still computes in float32: an autocast of the script's own is off around it; switch that on"

GIVEN = "the script is given {}; give it {} instead"
"""An edit of such a line would break the script's option."""

NORMS = (
    "for module in {}.modules():",
    '    if "norm" in type(module).__name__.lower():',
    "        module.float()",
)


@dataclass(frozen=True)
class HalfLines:
    """The lines of a script's ``files`` that make its weights half and train them; ``device`` is a torch device type.

    ``outside`` are files and lines that call the model without gradients and without autocast.
    """

    casts: tuple[CastLine, ...] = ()
    loop: LoopLines | None = None
    is_lowered: bool = False
    outside: tuple[tuple[str, int], ...] = ()
    files: tuple[str, ...] = ()
    device: str = "cpu"


@dataclass
class WeightEdits:
    """The edits of all files so far, with their titles and the lines that were not edited.

    ``refused`` are messages on lines that make weights half, and ``unlowered`` on lines to put under autocast by hand.
    ``lowers`` is true if the edits enable autocast.
    """

    lines: HalfLines
    titles: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unlowered: list[str] = field(default_factory=list)
    lowers: bool = False
    _edits: dict[str, dict[Edit, None]] = field(default_factory=dict)

    def add(self, file: str, line: int, title: str, edits: Iterable[Edit], why_none: str = "") -> None:
        """Add the edits of a line, or the reason for having none."""
        known, place = list(edits), lines_title(file, [line])
        self._edits.setdefault(file, {}).update(dict.fromkeys(known))
        self.titles += [f"{place}: {title}"] * bool(known)
        self.refused += [f"by hand: {place}: {why_none}"] * (not known)

    def by_hand(self, after: HalfLines, *, are_half: bool) -> Iterator[str]:
        """Yield the remaining manual steps after the patched script ran; ``are_half`` if it still has half weights."""
        yield from self.refused * are_half
        yield from (self.unlowered or [OFF] * self.lowers) * (not after.is_lowered)
        if after.outside and self.lowers:
            places = listed([lines_title(file, [line]) for file, line in after.outside], 3)
            yield f"by hand: {places}: the model is called without gradients, now in float32; use the same autocast"

    def add_keywords(self, rows: Rows) -> bool:
        """Add keyword arguments to matching library calls; return True if there are any. Calls in the training loop's
        files take precedence over calls in other files. A value that the script is given is left to the user."""
        found: dict[str, list[tuple[ast.Call, str, str]]] = {}
        for file in self.lines.files:
            document = document_of(file)
            for call, (of, name, value) in product(document.calls, rows):
                if re.fullmatch(of, document.call_origin(call)):
                    found.setdefault(file, []).append((call, name, value))
        of_loop = found.keys() & (self.lines.loop.files if self.lines.loop is not None else ())
        for file in of_loop or found:
            document = document_of(file)
            for call, name, value in found[file]:
                known = argument(call, name)
                if known is not None and _is_given(document, known):
                    told = GIVEN.format(document.source(known), value)
                    self.unlowered.append(f"by hand: {lines_title(file, [call.lineno])}: {told}")
                else:
                    self.add(file, call.lineno, f"{name}={value}", [with_keyword(document, call, name, value)])
        return bool(found)

    def made(self) -> tuple[FileEdit, ...]:
        found = []
        for file, edits in ((file, tuple(edits)) for file, edits in self._edits.items() if edits):
            needed = ("torch",) * any("torch." in edit.new for edit in edits)
            before, after = Path(file).read_bytes(), applied(document_of(file), [Fix(edits, needed)])
            found.append(FileEdit(Path(file), before, after.encode(read_source(before).encoding)))
        return tuple(found)


def weights_in_float32(edits: WeightEdits) -> None:
    """Make the weights float32 and run the model under autocast in bfloat16."""
    for cast in edits.lines.casts:
        document = document_of(cast.file)
        statement = document.statements[cast.line]
        named = [node for node in _expressions(document, statement) if document.source(node) in cast.dtypes]
        given = [document.source(node) for node in named if _is_given(document, node)]
        why = "the weights become half there, in a way that ampdbg does not edit; make them float32"
        why = GIVEN.format(given[0], "torch.float32") if given else why
        made = () if given else _uncast(document, statement, cast.dtypes)
        edits.add(cast.file, cast.line, "weights in float32", made, why)
    _under_autocast(edits)


def norms_in_float32(edits: WeightEdits) -> None:
    """Make the weights of norms float32, leave the others half, and run the model under autocast in bfloat16."""
    for cast in edits.lines.casts:
        document = document_of(cast.file)
        statement = document.statements[cast.line]
        names = _model_named_by(document, statement)
        added = (below(document, statement, *(line.format(name) for line in NORMS)) for name in names)
        why = "the line gives the model no name by which its norms can be made float32"
        edits.add(cast.file, cast.line, "norms in float32", added, why)
    _under_autocast(edits)


def beta2_lowered(edits: WeightEdits) -> None:
    """Lower Adam's beta2 to a decay that half can represent."""
    edits.add_keywords(BETA2)


def _expressions(document: Document, statement: ast.stmt) -> list[ast.expr]:
    expressions = (node for node in ast.walk(statement) if isinstance(node, ast.expr))
    return [one for one in expressions if document.statement(one) is statement]


def _is_given(document: Document, node: ast.expr) -> bool:
    """True for a name or an attribute whose value the file does not spell out: a parameter, or a read argument."""
    is_name = isinstance(node, (ast.Name, ast.Attribute)) and not document.origin(node)
    return is_name and not all(
        isinstance(one, ast.Constant) or document.origin(one) for one in document.values(node) or [node]
    )


def _uncast(document: Document, statement: ast.stmt, dtypes: frozenset[str]) -> Iterator[Edit]:
    for node in _expressions(document, statement):
        owner = method(node, "bfloat16", "half")
        if owner is not None:
            of, call = document.source(owner), document.source(node)
            is_all = document.source(document.parents[node]) in (call, f"{of} = {call}")
            yield replaced(document, node, of + ".float()" * is_all)
        elif document.source(node) in dtypes:
            yield replaced(document, node, '"float32"' if isinstance(node, ast.Constant) else "torch.float32")
        elif isinstance(node, ast.Call) and method(node, *LOADERS) is not None:
            names = {keyword.arg for keyword in node.keywords} & {"dtype", "torch_dtype"}
            yield from [] if names else [with_keyword(document, node, "dtype", "torch.float32")]


def _model_named_by(document: Document, statement: ast.stmt) -> list[str]:
    """Return the name of the model that a statement makes half: ``model = Net().half()``, ``model.half()``."""
    match statement:
        case ast.Assign([ast.Attribute(attr="data")]):
            return []  # a parameter, not a model
        case ast.Assign([ast.Name() | ast.Attribute() as target]):
            return [document.source(target)]
        case ast.Expr(ast.Call(ast.Attribute(ast.Name() | ast.Attribute() as owner))):
            return [document.source(owner)]
    return []


def _under_autocast(edits: WeightEdits) -> None:
    """Put the training loop's forward pass and loss under autocast, by a library's argument or a ``with`` block."""
    loop, device = edits.lines.loop, edits.lines.device
    if edits.lines.is_lowered or loop is None:
        return
    edits.lowers = True
    if edits.add_keywords(AUTOCAST):
        return
    document = document_of(loop.file)
    if statements := _between(document, loop):
        title = f"forward pass and loss under autocast, on {device} in bfloat16"
        edits.add(loop.file, loop.first, title, indented(document, statements, IN_BFLOAT16.format(device)))
        return
    place = lines_title(loop.file, [loop.first])
    edits.unlowered.append(
        f"by hand: {place}: the model's call and the backward pass are no statements of one "
        f"block; run what comes before the backward pass in `{IN_BFLOAT16.format(device)}`"
    )


def _between(document: Document, loop: LoopLines) -> Sequence[ast.stmt]:
    """Return the statements from the first model call up to the backward pass, in the innermost block with both. A
    final ``zero_grad`` is omitted."""
    first, last = (document.statements[line] for line in (loop.first, loop.backward))
    for begin, end in product(_statements_around(document, first), _statements_around(document, last)):
        block = document.block(begin)
        if block is document.block(end):
            lines = range(begin.lineno, end.lineno)
            found = [one for one in block if (one.end_lineno or 0) >= lines.start and one.lineno < lines.stop]
            while len(found) > 1 and method(getattr(found[-1], "value", found[-1]), "zero_grad"):
                found.pop()
            return found if found and is_movable(document, found) else ()
    return ()


def _statements_around(document: Document, inner: ast.stmt) -> list[ast.stmt]:
    return [one for one in (inner, *document.around(inner)) if isinstance(one, ast.stmt)]
