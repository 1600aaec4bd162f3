"""torch.cuda.amp, which torch has given up for torch.amp, and its new spelling."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from ampdbg.lint.document import Document
from ampdbg.lint.edits import removed, replaced
from ampdbg.lint.expressions import takes_stars
from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Edit, Fix, Rule, RuleHit

CODE = "deprecated-amp"
HOMES = ("torch.cuda.amp", "torch.cpu.amp")
MOVED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "autocast": ("", ("enabled", "dtype", "cache_enabled")),
    "GradScaler": ("", ()),
    "custom_fwd": ("device_type=", ()),
    "custom_bwd": ("device_type=", ()),
}
"""What torch.amp has of them: how the device is given, and the names of arguments that were given by their place."""


def check(facts: Facts) -> Iterator[RuleHit]:
    """Every use of one; a file that is there for several torches, by ``try`` or ``hasattr``, is left alone."""
    document = facts.document
    uses = [
        (node, origin)
        for node in document.loads()
        if (origin := _moved(document, node)) and not isinstance(document.parents[node], ast.Attribute)
    ]
    calls = [node for node in uses if _is_used(document, node[0])]
    if not calls or _is_for_several(document):
        return
    if any(_is_a_fallback(document, node) for node, _ in uses):
        return
    fix = _fix(document, [node for node, _ in uses])
    for node, origin in calls:
        home, _, name = origin.rpartition(".")
        device = home.split(".")[1]
        what = f'torch.amp.{name}({MOVED[name][0]}"{device}", ...)'
        yield RuleHit(CODE, node, f"{origin} is deprecated since torch 2.4", f"spell it {what}", fix=fix)


def _moved(document: Document, node: ast.expr) -> str:
    """The old name that an expression is, or ""."""
    origin = document.origin(node)
    home, _, name = origin.rpartition(".")
    return origin if home in HOMES and name in MOVED else ""


def _is_used(document: Document, node: ast.expr) -> bool:
    """It is called, or decorates; a name that is only passed on does not warn here."""
    parent = document.parents[node]
    return (isinstance(parent, ast.Call) and parent.func is node) or node in getattr(parent, "decorator_list", ())


_ASKS = ("torch.__version__", 'hasattr(torch, "amp', "hasattr(torch.amp", "TORCH_VERSION", "is_torch_greater")


def _is_for_several(document: Document) -> bool:
    """A ``try`` or an ``if`` imports it, or the file asks torch for its version."""
    texts = ((node, ast.unparse(node)) for node in _imports(document))
    imports = [node for node, text in texts if "amp" in text and "torch" in text]
    guarded = any(isinstance(one, (ast.Try, ast.If)) for node in imports for one in document.around(node))
    return guarded or any(word in document.text for word in _ASKS)


def _is_a_fallback(document: Document, node: ast.expr) -> bool:
    """torch.amp's is beside it in a ``try``, an ``if`` or a conditional expression."""
    choices = (one for one in document.around(node) if isinstance(one, (ast.Try, ast.If, ast.IfExp)))
    return any("torch.amp." in ast.unparse(one) for one in choices)


def _imports(document: Document) -> list[ast.Import | ast.ImportFrom]:
    return [*document.find(ast.ImportFrom), *document.find(ast.Import)]


def _fix(document: Document, uses: list[ast.expr]) -> Fix | None:
    """Every use and every import of the file, or nothing."""
    edits: list[Edit] = []
    for node in uses:
        made = _use(document, node)
        if made is None:
            return None
        edits += made
    for line in _imports(document):
        made = _import(document, line)
        if made is None:
            return None
        edits += made
    return Fix(tuple(dict.fromkeys(edits)))


def _use(document: Document, node: ast.expr) -> list[Edit] | None:
    """A call with its device, and its name where that has torch.cuda.amp in it."""
    parent, origin = document.parents[node], document.origin(node)
    home, _, name = origin.rpartition(".")
    device = f'{MOVED[name][0]}"{home.split(".")[1]}"'
    edits = _named_anew(document, node, home)
    if node in getattr(parent, "decorator_list", ()):
        end = document.span(node).end
        return None if name == "autocast" else [*edits, Edit(end, end, f"({device})")]
    if not isinstance(parent, ast.Call) or parent.func is not node or takes_stars(parent):
        return None
    places = MOVED[name][1]
    if places and len(parent.args) > len(places):
        return None
    start = document.text.index("(", document.span(node).end) + 1
    has_more = bool(parent.args or parent.keywords)
    edits.append(Edit(start, start, f"{device}, " if has_more else device))
    for place, given in zip(places, parent.args, strict=False):
        at = document.span(given).start
        edits.append(Edit(at, at, f"{place}="))
    return edits


def _named_anew(document: Document, node: ast.expr, home: str) -> list[Edit]:
    """``torch.cuda.amp.autocast`` becomes ``torch.amp.autocast``; a shorter name changes by its import."""
    if isinstance(node, ast.Attribute) and home.removeprefix("torch.") in ast.unparse(node.value):
        return [replaced(document, node.value, "torch.amp")]
    return []


def _import(document: Document, line: ast.ImportFrom | ast.Import) -> list[Edit] | None:
    """``from torch.cuda.amp import autocast`` and its like; None where one cannot be kept."""
    if isinstance(line, ast.Import):
        return _plain_import(document, line)
    if line.module in (*HOMES, "torch.cuda.amp.autocast_mode", "torch.cuda.amp.grad_scaler"):
        is_known = all(alias.name in MOVED for alias in line.names)
        return [_module(document, line, line.module, "torch.amp")] if is_known else None
    if line.module in ("torch.cuda", "torch.cpu") and any(alias.name == "amp" for alias in line.names):
        return [_module(document, line, line.module, "torch")] if len(line.names) == 1 else None
    return []


def _plain_import(document: Document, line: ast.Import) -> list[Edit] | None:
    """``import torch.cuda.amp``, which is no more than ``import torch``, and ``import torch.cuda.amp as amp``."""
    edits = []
    for alias in (one for one in line.names if one.name in HOMES):
        if alias.asname is not None:
            edits.append(replaced(document, alias, f"torch.amp as {alias.asname}"))
        elif len(line.names) > 1:
            return None
        else:
            others = (one for one in document.find(ast.Import) if one is not line)
            is_imported = any(own.name == "torch" and not own.asname for one in others for own in one.names)
            edits.append(removed(document, line) if is_imported else replaced(document, line, "import torch"))
    return edits


def _module(document: Document, line: ast.ImportFrom, old: str, new: str) -> Edit:
    start = document.text.index(old, document.span(line).start)
    return Edit(start, start + len(old), new)


RULE = Rule(
    (CODE,),
    ("amp", "cuda|cpu", "torch"),
    check,
    invalid=(
        """
from torch.cuda.amp import GradScaler, autocast as ac

def train(model, optimizer, loader, use_amp):
    scaler = GradScaler(enabled=use_amp)  # <- deprecated-amp
    for x in loader:
        with ac(use_amp):  # <- deprecated-amp
            loss = model(x)
""",
        """
import torch
from torch.cuda import amp

@torch.cuda.amp.custom_fwd  # <- deprecated-amp
def forward(ctx, x):
    with amp.autocast(enabled=False):  # <- deprecated-amp
        return x
""",
    ),
    valid=(
        """
from torch.amp import GradScaler, autocast

def train(model, use_amp):
    scaler = GradScaler("cuda", enabled=use_amp)
    with autocast("cuda", enabled=use_amp):
        model()
""",
        """
try:
    from torch.amp import GradScaler
except ImportError:
    from torch.cuda.amp import GradScaler

scaler = GradScaler()
""",
        """
import torch

def scaler_for(device):
    try:
        return torch.amp.GradScaler(device=device)
    except TypeError:
        return torch.cuda.amp.GradScaler()
""",
    ),
    pattern=r"c(?:uda|pu)\s*\.\s*amp|from torch\.c(?:uda|pu) import",
    since=(2, 4),
)
