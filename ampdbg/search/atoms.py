"""The tree of what can be pinned: its atoms, from pins' names to sets of them, and back to the fewest names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampdbg.record.pins import OWN

Atoms = frozenset[str]
"""A set of atoms: of a leaf module's name, or of ``NAME:own``, a parent's own lines."""


@dataclass(frozen=True)
class AtomTree:
    """The modules that ran, as atoms in tree order: depth first, a parent's own lines before its children's.

    All atoms of a subtree stand next to each other, and together they are its module. ``levels`` has one number
    an atom: how deep in the tree the largest subtree is that begins with it (0 is the root). ``modules`` likewise
    has the largest module that begins with it and may be pinned, and where that module's atoms end.
    """

    atoms: tuple[str, ...]
    levels: tuple[int, ...]
    modules: tuple[tuple[str, int], ...]
    _spans: Mapping[str, tuple[int, int]]

    def __contains__(self, name: object) -> bool:
        """Whether :meth:`under` knows the name."""
        return name in self._spans

    def under(self, name: str) -> tuple[str, ...]:
        """The atoms of a module, of an atom, or of a container that never ran itself, such as a ModuleList.

        Raises:
            KeyError: nothing of that name ran.
        """
        start, end = self._spans[name]
        return self.atoms[start:end]

    def own(self, name: str) -> str:
        """The atom that stands for the module's own lines: its name where it is a leaf or an atom already."""
        return name + OWN if name + OWN in self._spans else name

    def has_run(self, name: str) -> bool:
        """Whether it is an atom. What holds several root models is none: it has no lines of its own to be pinned."""
        return name in self._spans and self.under(name) == (name,)

    def parent(self, name: str) -> str | None:
        """What holds this atom, module or container, one level up; None above the root.

        Above ``NAME:own`` is ``NAME``. A root that never ran is a container too.
        """
        if name.endswith(OWN) and name.removesuffix(OWN) in self._spans:
            return name.removesuffix(OWN)
        return name.rpartition(".")[0] if name else None

    def expand(self, pins: Iterable[str]) -> Atoms:
        """The atoms of all the pins.

        Raises:
            KeyError: nothing of a pin's name ran.
        """
        return frozenset(atom for pin in pins for atom in self.under(pin))

    def compress(self, atoms: Iterable[str]) -> tuple[str, ...]:
        """The fewest pins that are these atoms, in tree order: a whole module wherever all of its atoms are in."""
        within = set(atoms)
        pins: list[str] = []
        end = 0
        for place in sorted(map(self.place, within)):
            if place < end:
                continue
            module, end = self.modules[place]
            if not within.issuperset(self.atoms[place:end]):
                module, end = self.atoms[place], place + 1
            pins.append(module)
        return tuple(pins)

    def place(self, atom: str) -> int:
        """Where the atom, or a module's first one, stands in ``atoms``."""
        return self._spans[atom][0]


def atom_tree(names: Sequence[str]) -> AtomTree:
    """The tree of the modules that ran.

    Args:
        names: their qualified names, "" for the root, in order of execution or registration; that becomes the order
            of siblings. Containers that never ran need not be named, and are never a pin: nothing would run in them.
    """
    if not names:
        return AtomTree((), (), (), {"": (0, 0)})
    children = _children(names)
    nodes = _depth_first(children)
    ran = frozenset(names)
    atoms: list[str] = []
    spans: dict[str, tuple[int, int]] = {}
    starts: dict[str, int] = {}
    for name in nodes:
        starts[name] = len(atoms)
        if name in ran:
            atom = name + OWN if name in children else name
            spans[atom] = (len(atoms), len(atoms) + 1)
            atoms.append(atom)
    levels = [0] * len(atoms)
    modules = [("", 0)] * len(atoms)
    for name in reversed(nodes):  # a node comes after all that it holds, so that the outermost has the last word
        last = children[name][-1] if name in children else None
        spans[name] = spans[name] if last is None else (starts[name], spans[last][1])
        levels[starts[name]] = name.count(".") + 1 if name else 0
        if name in ran:
            modules[starts[name]] = (name, spans[name][1])
    return AtomTree(tuple(atoms), tuple(levels), tuple(modules), spans)


def _children(names: Iterable[str]) -> dict[str, list[str]]:
    """What each node holds, containers included, in the order of the first name in it."""
    children: dict[str, list[str]] = {}
    seen = {""}
    for name in names:
        node = name
        while node not in seen:
            seen.add(node)
            parent = node.rpartition(".")[0]
            children.setdefault(parent, []).append(node)
            node = parent
    return children


def _depth_first(children: Mapping[str, Sequence[str]]) -> list[str]:
    nodes: list[str] = []
    ahead = [""]  # not recursive: modules may be nested deeper than Python's stack
    while ahead:
        nodes.append(ahead.pop())
        ahead.extend(reversed(children.get(nodes[-1], ())))
    return nodes
