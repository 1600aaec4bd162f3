"""A file that trains with apex.amp, turned to torch.autocast and GradScaler: the whole file, or nothing of it.

In the place of ``amp.initialize`` a scaler is made; functions that scale a loss get it as their last argument; the
forward pass and the loss come under autocast; the backward pass, clipping and the step go through the scaler.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ampdbg.lint.apex_classes import REWRITES, public_name
from ampdbg.lint.document import FUNCTIONS, Document
from ampdbg.lint.edits import above, below, indented, is_movable, removed, replaced, usual_indent
from ampdbg.lint.expressions import argument, constant, method, takes_stars
from ampdbg.lint.rule import Edit, Fix

AMP = "apex.amp."
SETTINGS = {"opt_level", "keep_batchnorm_fp32", "loss_scale", "cast_model_outputs", "verbosity", "enabled"}
SCALED = ("scale_loss", "master_params", "state_dict", "load_state_dict", "initialize")


class NotCertain(Exception):  # noqa: N818 - no error of the user's
    """The file is not rewritten; ``str(error)`` says what of it a person has to decide."""


@dataclass(frozen=True)
class Reference:
    """A use of something of apex's: its node and its name."""

    node: ast.expr
    origin: str


def references(document: Document) -> list[Reference]:
    """Every use of apex, the longest name of each."""
    found = []
    for node in document.loads():
        parent = document.parents[node]
        longer = isinstance(parent, ast.Attribute) and document.origin(parent).startswith("apex.")
        origin = public_name(document.origin(node))
        if origin.startswith("apex.") and not longer:
            found.append(Reference(node, origin))
    return found


def imports_of_apex(document: Document) -> list[ast.Import | ast.ImportFrom]:
    """Every import statement that brings in something of apex's."""
    froms = [
        one for one in document.find(ast.ImportFrom) if not one.level and (one.module or "").split(".")[0] == "apex"
    ]
    plain = [one for one in document.find(ast.Import) if any(name.name.split(".")[0] == "apex" for name in one.names)]
    return [*froms, *plain]


def is_optional(document: Document) -> bool:
    """Whether the file also runs where apex is missing: an import of it stands in a ``try`` that goes on."""
    for line in imports_of_apex(document):
        for one in document.around(line):
            if isinstance(one, ast.Try) and not all(_gives_up(handler.body) for handler in one.handlers):
                return True
    return False


def _gives_up(body: Sequence[ast.stmt]) -> bool:
    last = body[-1]
    return isinstance(last, ast.Raise) or (isinstance(last, ast.Expr) and "exit" in ast.unparse(last))


def class_fix(document: Document, used: Sequence[Reference]) -> Fix | None:
    """Torch's classes for apex's, where that is all that the file has of apex."""
    edits: list[Edit] = []
    for one in used:
        made = REWRITES[one.origin][1](document, one.node) if one.origin in REWRITES else None
        if made is None:
            return None
        edits += made
    return Fix((*edits, *_without_imports(document)), ("torch",)) if edits else None


def _without_imports(document: Document) -> Iterator[Edit]:
    """No import of apex; a ``try`` that had nothing else goes with them.

    Raises:
        NotCertain: an import cannot be taken out on its own.
    """
    gone = imports_of_apex(document)
    blocks = {id(one): one for line in gone for one in [document.parents[line]]}
    for block in blocks.values():
        body: Sequence[ast.stmt] = getattr(block, "body", ())
        inside = [line for line in gone if document.parents[line] is block]
        if isinstance(block, ast.Try) and len(inside) == len(block.body) and not block.orelse and not block.finalbody:
            yield removed(document, block)
        elif len(inside) == len(body) and len(inside) > 1:
            raise NotCertain("a block holds nothing but imports of apex")
        else:
            for line in inside:
                yield _without(document, line)


def _without(document: Document, line: ast.Import | ast.ImportFrom) -> Edit:
    if isinstance(line, ast.Import):
        kept = [one for one in line.names if one.name.split(".")[0] != "apex"]
        if kept:
            return replaced(document, line, f"import {', '.join(map(document.source, kept))}")
    if not document.has_own_lines(line):
        raise NotCertain("an import of apex shares its line")
    return removed(document, line)


@dataclass(frozen=True)
class Migration:
    """The rewriting of one file; each part raises :class:`NotCertain` where a person has to decide."""

    document: Document
    used: tuple[Reference, ...]

    def fix(self) -> Fix:
        """All edits of the file."""
        edits = [*self._scaler(), *self._losses(), *self._others(), *_without_imports(self.document)]
        unique = list(dict.fromkeys(edits))
        return Fix(tuple(unique), ("torch",))

    def _of(self, name: str) -> list[ast.Call]:
        """The calls of one of amp's functions."""
        calls = []
        for one in self.used:
            if one.origin == f"{AMP}{name}":
                call = self.document.parents[one.node]
                if not isinstance(call, ast.Call) or call.func is not one.node or takes_stars(call):
                    raise NotCertain(f"amp.{name} is not called in a way that can be read")
                calls.append(call)
        return calls

    @cached_property
    def name(self) -> str:
        """What the scaler is called: a name that the file does not have."""
        taken = {node.id for node in self.document.find(ast.Name)} | {one.arg for one in self.document.find(ast.arg)}
        free = [name for name in ("scaler", "grad_scaler", "amp_scaler") if name not in taken]
        if not free:
            raise NotCertain("the file uses the names scaler and grad_scaler for something else")
        return free[0]

    @cached_property
    def start(self) -> ast.Call:
        """The one call of amp.initialize."""
        calls = self._of("initialize")
        if len(calls) != 1:
            raise NotCertain(f"amp.initialize is called {len(calls)} times")
        call = calls[0]
        if {word.arg for word in call.keywords} - SETTINGS - {"models", "optimizers"}:
            raise NotCertain("amp.initialize has options of its own (num_losses, min_loss_scale, ...)")
        scale = argument(call, "loss_scale")
        if isinstance(constant(scale), (int, float)):
            raise NotCertain("the loss scale is static; GradScaler's is dynamic")
        return call

    @cached_property
    def model(self) -> str:
        """The name of the model."""
        return self._target(0)

    @cached_property
    def optimizer(self) -> str:
        """The name of the optimizer."""
        return self._target(1)

    def _target(self, index: int) -> str:
        statement = self.document.statement(self.start)
        targets = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is self.start else None
        given = argument(self.start, ("models", "optimizers")[index], index)
        if isinstance(targets, ast.Tuple) and len(targets.elts) == 2 and given is not None:
            target = targets.elts[index]
            if isinstance(target, (ast.Name, ast.Attribute)) and ast.unparse(target) == ast.unparse(given):
                return ast.unparse(target)
        raise NotCertain("amp.initialize does not give back one model and one optimizer by their names")

    @cached_property
    def condition(self) -> str:
        """What has to hold for AMP to be on; "" where it always is."""
        parts = []
        if (around := self._around()) is not None:
            parts.append(self.document.source(around.test))
        enabled, level = argument(self.start, "enabled"), argument(self.start, "opt_level", 3)
        if enabled is not None and constant(enabled) is not True:
            parts.append(self.document.source(enabled))
        if level is not None and not isinstance(level, ast.Constant):
            parts.append(f'{self.document.source(level)} != "O0"')
        elif constant(level) == "O0":
            parts.append("False")
        elif constant(level) == "O3":
            raise NotCertain("O3 keeps the whole model in half, which autocast does not")
        return parts[0] if len(parts) == 1 else " and ".join(f"({one})" for one in parts)

    def _around(self) -> ast.If | None:
        """The ``if`` that holds amp.initialize and no more than imports beside it.

        Raises:
            NotCertain: the call stands under something else.
        """
        document, statement = self.document, self.document.statement(self.start)
        parent = document.parents[statement]
        if parent is document.unit(statement):
            return None
        if isinstance(parent, ast.If) and not parent.orelse and document.parents[parent] is document.unit(statement):
            others = [one for one in parent.body if one is not statement and not self._is_apex_import(one)]
            if not others:
                return parent
        raise NotCertain("amp.initialize stands in a block with other code")

    def _is_apex_import(self, node: ast.stmt) -> bool:
        return node in imports_of_apex(self.document)

    # The scaler, made and handed on

    def _scaler(self) -> Iterator[Edit]:
        document = self.document
        unit = document.unit(self.start)
        enabled = f", enabled={self.condition}" if self.condition else ""
        made = f'{self.name} = torch.amp.GradScaler("cuda"{enabled})'
        statement = document.statement(self.start)
        yield replaced(document, self._around() or statement, made)
        for function in dict.fromkeys(document.function(call) for call in self._scaling()):
            if function is not None and function is not unit and isinstance(unit, FUNCTIONS):
                yield from self._handed_to(function, unit)

    def _scaling(self) -> list[ast.Call]:
        return [call for name in SCALED[:-1] for call in self._of(name)]

    def _handed_to(self, function: ast.FunctionDef | ast.AsyncFunctionDef, unit: ast.AST) -> Iterator[Edit]:
        """A last parameter, and a last argument at every call, all of which stand where the scaler is made."""
        document, given = self.document, function.args
        if (
            given.vararg
            or given.kwarg
            or given.kwonlyargs
            or given.defaults
            or not given.args
            or document.class_of(function)
        ):
            raise NotCertain(f"{function.name} cannot be given the scaler as its last argument")
        last = document.span(given.args[-1]).end
        yield Edit(last, last, f", {self.name}")
        for use in document.read(function.name, document.scopes[function]):
            call = document.parents[use]
            if (
                not isinstance(call, ast.Call)
                or call.func is not use
                or takes_stars(call)
                or document.unit(call) is not unit
            ):
                raise NotCertain(f"{function.name} is called where the scaler is not at hand")
            if (call.lineno, call.col_offset) < (self.start.lineno, self.start.col_offset):
                raise NotCertain(f"{function.name} is called before the scaler is made")
            parts = [*call.args, *(word.value for word in call.keywords)]
            if not parts:
                raise NotCertain(f"{function.name} is called without arguments")
            end = max(document.span(one).end for one in parts)
            yield Edit(end, end, f", {self.name}={self.name}" if call.keywords else f", {self.name}")

    # Each scaled loss

    def _losses(self) -> Iterator[Edit]:
        losses = self._of("scale_loss")
        if not losses:
            raise NotCertain("amp.scale_loss stands in another file")
        for call in losses:
            yield from self._loss(call)

    def _loss(self, call: ast.Call) -> Iterator[Edit]:
        """``with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()``, and the forward pass above it."""
        document = self.document
        if len(call.args) != 2 or call.keywords:
            raise NotCertain("amp.scale_loss has options (delay_unscale, loss_id)")
        block = document.statement(call)
        loss, optimizer = document.source(call.args[0]), document.source(call.args[1])
        if not isinstance(block, ast.With) or len(block.items) != 1 or len(block.body) != 1:
            raise NotCertain("amp.scale_loss is no block of one backward pass")
        scaled = block.items[0].optional_vars
        backward = block.body[0]
        inner = backward.value if isinstance(backward, ast.Expr) else None
        owner = method(inner, "backward") if inner is not None else None
        if (
            scaled is None
            or owner is None
            or ast.unparse(owner) != ast.unparse(scaled)
            or not isinstance(inner, ast.Call)
        ):
            raise NotCertain("amp.scale_loss is no block of one backward pass")
        given = document.text[document.span(owner).end : document.span(inner).end]
        whole = self._with_its_twin(block, loss)
        yield replaced(document, whole, f"{self.name}.scale({loss}){given}")
        yield from self._forward(whole, call.args[0])
        yield from self._steps(whole, optimizer)

    def _with_its_twin(self, block: ast.With, loss: str) -> ast.stmt:
        """The ``if`` around it whose other branch goes backward without AMP; else the block itself."""
        parent = self.document.parents[block]
        if isinstance(parent, ast.If):
            twin = ast.unparse(parent.orelse[0]) if len(parent.orelse) == 1 else ""
            if parent.body == [block] and twin.startswith(f"{loss}.backward("):
                return parent
            raise NotCertain("the backward pass stands under a condition")
        return block

    def _forward(self, backward: ast.stmt, loss: ast.expr) -> Iterator[Edit]:
        """The statements from the first call of the model to the loss come under autocast."""
        document = self.document
        block = document.block(backward)
        before = list(block[: block.index(backward)])
        last = next((at for at in reversed(range(len(before))) if _assigns(before[at], ast.unparse(loss))), -1)
        if last < 0:
            raise NotCertain("the loss is not computed in the block of its backward pass")
        first = next((at for at in range(last + 1) if self._calls_model(before[at])), None)
        # A loss that is changed further down, as by a division, was computed above.
        while first is not None and last > first and _is_aug(before[last], ast.unparse(loss)):
            last -= 1
        if first is None or not is_movable(document, before[first : last + 1]):
            raise NotCertain(f"no call of {self.model} stands above the loss in its block")
        enabled = f", enabled={self.name}.is_enabled()" if self.condition else ""
        head = f'with torch.autocast("cuda"{enabled}):'
        yield from indented(document, before[first : last + 1], head, usual_indent(document))

    def _calls_model(self, statement: ast.stmt) -> bool:
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        name = self.model.rpartition(".")[2]
        return any(ast.unparse(call.func) in (self.model, name, f"self.{name}") for call in calls)

    def _steps(self, backward: ast.stmt, optimizer: str) -> Iterator[Edit]:
        """The optimizer's steps of the same function go through the scaler, and its scale is updated."""
        document = self.document
        unit = document.unit(backward)
        steps = [
            call
            for call in document.calls
            if document.unit(call) is unit and (owner := method(call, "step")) is not None
            and ast.unparse(owner) == optimizer
        ]  # fmt: skip
        if len(steps) != 1 or steps[0].args or steps[0].keywords:
            raise NotCertain(f"{optimizer}.step() does not stand once in the function of the backward pass")
        statement = document.statement(steps[0])
        if (
            not isinstance(statement, ast.Expr)
            or statement.value is not steps[0]
            or not document.has_own_lines(statement)
        ):
            raise NotCertain(f"{optimizer}.step() shares its line")
        yield replaced(document, steps[0], f"{self.name}.step({optimizer})")
        yield below(document, statement, f"{self.name}.update()")

    # Clipping, checkpoints, classes

    def _others(self) -> Iterator[Edit]:
        for call in self._of("master_params"):
            yield from self._clipping(call)
        for call in (*self._of("state_dict"), *self._of("load_state_dict")):
            if self.document.unit(call) is not self.document.unit(self.start):
                raise NotCertain("amp's state is saved where the scaler is not at hand")
            assert isinstance(call.func, ast.Attribute)
            yield replaced(self.document, call.func, f"{self.name}.{call.func.attr}")
        for one in self.used:
            if one.origin.removeprefix(AMP) in SCALED and one.origin.startswith(AMP):
                continue
            made = REWRITES[one.origin][1](self.document, one.node) if one.origin in REWRITES else None
            if made is None:
                raise NotCertain(f"{one.origin} has no sure counterpart")
            yield from made

    def _clipping(self, call: ast.Call) -> Iterator[Edit]:
        """Unscaled first, then the parameters themselves."""
        document = self.document
        statement = document.statement(call)
        clip = document.parents[call]
        if not isinstance(clip, ast.Call) or len(call.args) != 1 or not document.has_own_lines(statement):
            raise NotCertain("amp.master_params is not handed to a clipping function")
        optimizer = document.source(call.args[0])
        yield above(document, statement, f"{self.name}.unscale_({optimizer})")
        yield replaced(document, call, self._parameters(call.args[0], optimizer))

    def _parameters(self, node: ast.expr, optimizer: str) -> str:
        """All that the optimizer steps: the model's parameters, where it was made of them."""
        made = self.document.values(node) if isinstance(node, (ast.Name, ast.Attribute)) else []
        # What a checkpoint's loader gives back is the optimizer that it was given.
        calls = [one for one in made if isinstance(one, ast.Call) and one is not self.start]
        others = [one for one in calls if optimizer not in map(ast.unparse, one.args)]
        of = [method(argument(one, "params", 0) or one, "parameters") for one in others]
        names = {ast.unparse(one) for one in of if one is not None}
        if len(names) == 1 and None not in of:
            return f"{names.pop()}.parameters()"
        return f'[p for group in {optimizer}.param_groups for p in group["params"]]'


def _assigns(statement: ast.stmt, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    flat = [one for target in targets if target is not None for one in getattr(target, "elts", [target])]
    return any(ast.unparse(one) == name for one in flat)


def _is_aug(statement: ast.stmt, name: str) -> bool:
    """``loss /= n`` and ``loss = loss / n``."""
    if isinstance(statement, ast.AugAssign):
        return True
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.BinOp)
        and name in ast.unparse(statement.value)
    )


def migration(document: Document, used: Sequence[Reference]) -> tuple[Fix | None, str]:
    """The fix of a whole file, or what stands in its way."""
    try:
        return Migration(document, tuple(used)).fix(), ""
    except NotCertain as why:
        return None, str(why)
