"""torch.cuda.amp, which torch has deprecated in favor of torch.amp, and its new spelling."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import Rule, RuleHit
from ampdbg.source.document import Document
from ampdbg.source.edits import Edit, Fix, replaced
from ampdbg.source.expressions import takes_stars

CODE = "deprecated-amp"
HOMES = ("torch.cuda.amp", "torch.cpu.amp")
MODULES = (*HOMES, "torch.cuda.amp.autocast_mode", "torch.cuda.amp.grad_scaler")
MOVED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "autocast": ("", ("enabled", "dtype", "cache_enabled")),
    "GradScaler": ("", ()),
    "custom_fwd": ("device_type=", ()),
    "custom_bwd": ("device_type=", ()),
}
"""How torch.amp takes the device, and the names of arguments that were positional."""


OLD = {f"{home}.{name}" for home in HOMES for name in MOVED}


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check every use. A file that supports several torch versions, by ``try`` or ``hasattr``, is skipped."""
    document = facts.document
    origins = ((node, document.origin(node)) for node in document.loads())
    moved = [(node, origin) for node, origin in origins if origin in OLD]
    uses = [one for one in moved if not isinstance(document.parents[one[0]], ast.Attribute)]
    # A name that is only an argument does not warn here.
    decorators = (node for made in document.definitions for node in made.decorator_list)
    called = {*(call.func for call in document.calls), *decorators}
    calls = [one for one in uses if one[0] in called]
    nodes = [node for node, _ in uses]
    if not calls or _is_for_several(document, nodes):
        return
    fix = _fix(document, nodes)
    for node, origin in calls:
        home, _, name = origin.rpartition(".")
        device = home.split(".")[1]
        what = f'torch.amp.{name}({MOVED[name][0]}"{device}", ...)'
        yield RuleHit(CODE, node, f"{origin} is deprecated since torch 2.4", f"spell it {what}", fix=fix)


_ASKS = ("torch.__version__", 'hasattr(torch, "amp', "hasattr(torch.amp", "TORCH_VERSION", "is_torch_greater")


def _is_for_several(document: Document, uses: Sequence[ast.expr]) -> bool:
    """True if ``try`` or ``if`` guards the import or surrounds torch.amp, or the file checks torch's version."""
    texts = ((node, ast.unparse(node)) for node in document.imports)
    imports = [node for node, text in texts if "amp" in text and "torch" in text]
    choices = (one for node in uses for one in document.around(node) if isinstance(one, (ast.Try, ast.If, ast.IfExp)))
    is_guarded = any(isinstance(one, (ast.Try, ast.If)) for node in imports for one in document.around(node))
    is_beside = any("torch.amp." in ast.unparse(one) for one in choices)
    return is_guarded or is_beside or any(word in document.text for word in _ASKS)


def _fix(document: Document, uses: Sequence[ast.expr]) -> Fix | None:
    """Return a fix for every use and every import of the file, or None."""
    made = [*(_use(document, node) for node in uses), *(_import(document, line) for line in document.imports)]
    edits = dict.fromkeys(edit for each in made for edit in each or ())
    return None if None in made else Fix(tuple(edits))


def _use(document: Document, node: ast.expr) -> list[Edit] | None:
    """Return edits that add the device to a call, and rename it if torch.cuda.amp is in its name."""
    parent, origin = document.parents[node], document.origin(node)
    home, _, name = origin.rpartition(".")
    device = f'{MOVED[name][0]}"{home.split(".")[1]}"'
    # torch.cuda.amp.autocast becomes torch.amp.autocast; a shorter name changes by its import.
    is_whole = isinstance(node, ast.Attribute) and home.removeprefix("torch.") in ast.unparse(node.value)
    edits = [replaced(document, node.value, "torch.amp")] if is_whole else []  # type: ignore[attr-defined]
    end, places = document.span(node).end, MOVED[name][1]
    if node in getattr(parent, "decorator_list", ()):
        return None if name == "autocast" else [*edits, Edit(end, end, f"({device})")]
    if not isinstance(parent, ast.Call) or parent.func is not node or takes_stars(parent):
        return None
    if places and len(parent.args) > len(places):
        return None
    start = document.text.index("(", end) + 1
    edits.append(Edit(start, start, device + ", " * bool(parent.args or parent.keywords)))
    starts = ((place, document.span(given).start) for place, given in zip(places, parent.args, strict=False))
    return [*edits, *(Edit(at, at, f"{place}=") for place, at in starts)]


def _import(document: Document, line: ast.ImportFrom | ast.Import) -> list[Edit] | None:
    """Return the edits of ``from torch.cuda.amp import autocast`` and similar; None if an import cannot be kept."""
    if isinstance(line, ast.Import):
        return None if any(alias.name in HOMES for alias in line.names) else []
    homes = {**dict.fromkeys(MODULES, "torch.amp"), "torch.cuda": "torch", "torch.cpu": "torch"}
    module = line.module or ""
    names, new = [alias.name for alias in line.names], homes.get(module)
    if new is None or (new == "torch" and "amp" not in names):
        return []
    start = document.text.index(module, document.span(line).start)
    is_known = names == ["amp"] if new == "torch" else MOVED.keys() >= set(names)
    return [Edit(start, start + len(module), new)] if is_known else None


RULE = Rule(
    (CODE,),
    ("amp", "cuda|cpu", "torch"),
    check,
    invalid=(
        """
import torch
from torch.cuda import amp
from torch.cuda.amp import GradScaler, autocast as ac

@torch.cuda.amp.custom_fwd  # <- deprecated-amp
def forward(ctx, x):
    with amp.autocast(enabled=False):  # <- deprecated-amp
        return x

def train(model, x, use_amp):
    scaler = GradScaler(enabled=use_amp)  # <- deprecated-amp
    with ac(use_amp):  # <- deprecated-amp
        return model(x)
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
