"""Infer the scalers, optimizers, schedulers and autocast regions of a file from its lines."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeGuard

from ampdbg.source.document import FUNCTIONS, Document
from ampdbg.source.expressions import argument, constant, is_none, method, number, takes_stars, unmoved

Traced = Literal["scaler", "optimizer", "scheduler"]
AUTOCASTS = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast")
CLIPS = tuple(f"torch.nn.utils.{name}" for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"))
HOMES_OF_CLIPS = "torch.nn.utils.clip_grad."
_MAKERS: Mapping[Traced, re.Pattern[str]] = {
    "scaler": re.compile(r"torch\.((cuda\.)?amp\.)?GradScaler$"),
    "optimizer": re.compile(
        r"torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)?[A-Z]\w+$|apex\.optimizers\.(Fused|Distributed)\w+$"
        r"|(transformers|torch_optimizer|timm\.optim|bitsandbytes\.optim|lion_pytorch)\.(\w+\.)*[A-Z]\w+$"
    ),
    "scheduler": re.compile(r"torch\.optim\.lr_scheduler\.|(transformers|diffusers)\.(\w+\.)*get_(\w+_)?sched"),
}
_DTYPES = {"torch.float16": "float16", "torch.half": "float16", "torch.bfloat16": "bfloat16"} | {
    "torch.float32": "float32",
    "torch.float": "float32",
}
HALF = ("float16",)

USES_HALF = re.compile(rb"autocast|GradScaler|\.half\(\)|\bfp16\b|float16|from apex|import apex|mixed_precision")
"""Matches the files of a project that trains, or may train, in half."""


@dataclass(frozen=True)
class AutocastUse:
    """One use of autocast: ``device``, ``dtype`` and ``enabled`` are None if they cannot be read."""

    call: ast.Call
    device: str | None
    dtype: str | None
    enabled: bool | None

    @property
    def is_half(self) -> bool:
        """True if it casts to float16, as far as the code shows."""
        return self.dtype == "float16" and self.enabled is not False


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts of a document, each computed once."""

    document: Document
    _kinds: dict[tuple[Traced, object], bool] = field(default_factory=dict)

    # Objects

    def is_scaler(self, node: ast.AST | None) -> TypeGuard[ast.expr]:
        """True if an expression is a GradScaler, by its creation or its use (``s.scale(loss).backward()``)."""
        return self._is("scaler", node)

    def is_optimizer(self, node: ast.AST | None) -> bool:
        """True if an expression is an optimizer, by its creation or because a scaler or scheduler takes it."""
        return self._is("optimizer", node)

    def is_scheduler(self, node: ast.AST | None) -> bool:
        return self._is("scheduler", node)

    def _is(self, kind: Traced, node: ast.AST | None) -> bool:
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            return _MAKERS[kind].match(self.document.call_origin(node)) is not None
        key = (kind, self.document.key(node))
        if key not in self._kinds:
            self._kinds[key] = False  # for a name that is assigned itself
            self._kinds[key] = self._is_used(kind, node) or self._is_made(kind, node)
        return self._kinds[key]

    def _is_made(self, kind: Traced, node: ast.AST) -> bool:
        """True if every value of the variable is of the kind; a call that takes it, as ``amp.initialize``, is
        ignored."""
        key, values = self.document.key(node), self.document.values(node)
        made = [one for one in values if not isinstance(one, ast.Call) or key not in map(self.document.key, one.args)]
        return bool(made) and all(self._is(kind, value) for value in made)

    def _is_used(self, kind: Traced, node: ast.AST) -> bool:
        key = self.document.key(node)
        if kind == "scaler":
            return key in self._used_as_scalers
        return kind == "optimizer" and key in self._scaled | self._scheduled

    @cached_property
    def _used_as_scalers(self) -> set[tuple[object, str]]:
        """The variables in ``x.scale(loss).backward()``; only a scaler is used in that form."""
        scaled = (method(loss, "scale") for loss in self.document.owners("backward"))
        return {self.document.key(one) for one in scaled if isinstance(one, (ast.Name, ast.Attribute))}

    def is_scaled(self, optimizer: ast.expr) -> bool:
        """True if a scaler steps or unscales the optimizer."""
        return self.document.key(optimizer) in self._scaled

    @cached_property
    def _scheduled(self) -> set[tuple[object, str]]:
        schedulers = (call for call in self.document.calls if self.is_scheduler(call))
        return {self.document.key(call.args[0]) for call in schedulers if call.args}

    @cached_property
    def _scaled(self) -> set[tuple[object, str]]:
        return {self.document.key(call.args[0]) for call, _ in self.scaler_calls("step", "unscale_")}

    def scaler_calls(self, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield every call with arguments of the given scaler methods, with its scaler; most are calls of ``step``."""
        for call in self.document.calls:
            owner = method(call, *names)
            if call.args and self.is_scaler(owner):
                yield call, owner

    def scaler_of(self, loss: ast.expr | None) -> ast.expr | None:
        """Return the scaler that scales a loss, in the expression or in every assignment of its name."""
        values = self.document.values(loss) if isinstance(loss, ast.Name) else [loss]
        by = [method(value, "scale") for value in values]
        return by[0] if by and all(map(self.is_scaler, by)) else None

    @cached_property
    def scalers(self) -> list[ast.Call]:
        """Every call that creates a GradScaler."""
        return list(filter(self.is_scaler, self.document.calls))

    def is_surely_on(self, scaler: ast.Call) -> bool:
        """True if a scaler is created without ``enabled``, or with True."""
        enabled = argument(scaler, "enabled")
        most = 5 if self.document.call_origin(scaler) == "torch.cuda.amp.GradScaler" else 6
        return not takes_stars(scaler) and len(scaler.args) < most and (enabled is None or constant(enabled) is True)

    @cached_property
    def mentions_scaler(self) -> bool:
        """True if some text of the file suggests code that may scale a loss."""
        return re.search(r"(?i)scaler|scale_loss|loss_scale|accelerat|fabric|deepspeed", self.document.text) is not None

    def is_clip(self, call: ast.Call) -> bool:
        """True if a call clips gradients with a torch function. With an infinite limit it only measures them."""
        if self.document.call_origin(call).replace(HOMES_OF_CLIPS, "torch.nn.utils.") not in CLIPS:
            return False
        return number(argument(call, "max_norm", 1)) != math.inf

    # Autocast

    @cached_property
    def autocasts(self) -> list[AutocastUse]:
        return [made for call in self.document.calls if (made := self.autocast(call)) is not None]

    def autocast(self, node: ast.AST) -> AutocastUse | None:
        """Return the device, dtype and ``enabled`` of an ``autocast(…)``; None for any other node."""
        origin = self.document.call_origin(node)
        if not isinstance(node, ast.Call) or origin not in AUTOCASTS:
            return None
        if takes_stars(node):
            return AutocastUse(node, None, None, None)
        own = origin in AUTOCASTS[2:]  # its device is in its name
        named = argument(node, "device_type", 0)
        device = origin.split(".")[1] if own else constant(named)
        dtype, enabled = argument(node, "dtype", 1), argument(node, "enabled", 0 if own else 2)
        known = device if isinstance(device, str) else None
        default = {"cuda": "float16", "cpu": "bfloat16"}.get((known or "").partition(":")[0])
        lowers = default if dtype is None or is_none(dtype) else _DTYPES.get(self.document.origin(dtype))
        is_on = True if enabled is None else constant(enabled)
        return AutocastUse(node, known, lowers, is_on if isinstance(is_on, bool) else None)

    def region(self, node: ast.AST) -> AutocastUse | None:
        """Return the autocast that a node runs under within its own function, by a ``with`` or a decorator."""
        for below, one in itertools.pairwise((node, *self.document.around(node))):
            if isinstance(one, (ast.With, ast.AsyncWith)) and not isinstance(below, ast.withitem):
                for item in reversed(one.items):
                    if made := self.autocast_of(item.context_expr):
                        return made
            if isinstance(one, (*FUNCTIONS, ast.Lambda)):
                decorators = getattr(one, "decorator_list", ())
                found = (made for each in decorators if below not in decorators and (made := self.autocast(each)))
                return next(found, None)
        return None

    def autocast_of(self, manager: ast.expr) -> AutocastUse | None:
        """Return the autocast that a ``with`` enters, directly or by a variable."""
        held = list(map(self.autocast, self.document.values(manager)))
        return self.autocast(manager) or (held[0] if len(held) == 1 else None)

    @cached_property
    def _lowered(self) -> set[ast.ClassDef]:
        """The file's classes with instances called under float16's autocast, and the classes that they instantiate."""
        regions = ((call, self.region(call)) for call in self.document.calls)
        lowered = (call.func for call, region in regions if region is not None and region.is_half)
        waiting = [made for called in lowered for made in self._classes_of(self.document.values(called))]
        found: set[ast.ClassDef] = set()
        while waiting:
            owner = waiting.pop()
            if owner not in found:
                found.add(owner)
                waiting += self._classes_of(ast.walk(owner))
        return found

    def _classes_of(self, made: Iterable[ast.AST]) -> Iterator[ast.ClassDef]:
        """Yield the classes of the file that the calls among these nodes create."""
        for whole in map(unmoved, made):
            if isinstance(whole, ast.Call) and isinstance(whole.func, ast.Name) and whole.func.id in self._classes:
                yield self._classes[whole.func.id]

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        return {one.name: one for one in self.document.find(ast.ClassDef)}

    def runs_in_half(self, node: ast.AST) -> bool:
        """True if a node certainly runs under float16's autocast."""
        region = self.region(node)
        if region is not None:
            return region.is_half
        function, owner = self.document.function(node), self.document.class_of(node)
        is_own = function is not None and function.name not in ("__init__", "extra_repr", "reset_parameters")
        managers = (one.items for one in self.document.around(node) if isinstance(one, (ast.With, ast.AsyncWith)))
        is_cast_up = any("autocast" in ast.unparse(item.context_expr) for items in managers for item in items)
        return is_own and owner in self._lowered and not is_cast_up

    # Tensors

    def dtype(self, node: ast.AST) -> str:
        """Return the dtype that an expression names: "float16", "bfloat16", "float32", or ""."""
        return _DTYPES.get(self.document.origin(node), "")

    @cached_property
    def modules(self) -> dict[tuple[object, str], str]:
        """The torch module that each variable holds an instance of: ``torch.nn.Linear``; "" if they differ."""
        found: dict[tuple[object, str], str] = {}
        for call in self.document.calls:
            origin = self.document.call_origin(call)
            target = self.document.target(call) if origin.startswith("torch.nn.") else None
            if isinstance(target, (ast.Name, ast.Attribute)):
                key = self.document.key(target)
                found[key] = "" if found.get(key, origin) != origin else origin
        return found
