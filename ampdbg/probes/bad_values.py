"""Where inf and NaN go from the op that makes them: into nothing, into a NaN, or into the gradients of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ampdbg.ops import ATEN_MOVES, POLES, SATURATES, SOFTMAXES
from ampdbg.probes.op_trace import KnownMagnitudes, storage_of
from ampdbg.probes.tensors import Magnitude, float_values

NONE: frozenset[int] = frozenset()


class BadValues:
    """Follows the inf and NaN of a trace by the storage that holds them; ops are known by their place in it.

    ``poisonous`` are the producers whose infinities an op has made a NaN of, ``divisors`` those by whose it has
    divided: to zeros. ``in_gradients`` are the ops where what was added to a parameter's gradient starts, in the
    forward pass too: a backward pass takes what that has kept, whatever masks it there.
    """

    def __init__(self, known: KnownMagnitudes) -> None:
        self.poisonous: set[int] = set()
        self.divisors: set[int] = set()
        self.in_gradients: set[int] = set()
        self._known = known
        self._behind: dict[int, frozenset[int]] = {}
        self._given: Sequence[torch.Tensor] = ()
        self._read: Sequence[frozenset[int]] = ()
        self._infinite: Sequence[frozenset[int]] = ()
        self._saturated: set[int] = set()
        self._used: set[int] = set()

    @property
    def saturated(self) -> set[int]:
        """The producers whose infinities nothing reads but what makes of them what it makes of any large number."""
        return self._saturated - self._used - self.in_gradients

    def before(self, given: Sequence[torch.Tensor]) -> None:
        """To be called before an op runs, which may write into what it is given."""
        self._given, self._read, self._infinite = given, (), ()
        if self._behind:
            found = [self._still_behind(tensor) for tensor in given]
            self._read = [behind for behind, _ in found]
            self._infinite = [NONE if has_nan else behind for behind, has_nan in found]

    def after(self, index: int, name: str, before: Magnitude, made: Sequence[torch.Tensor]) -> None:
        """To be called with what the op has made: it will be ``index``, ``before`` is the magnitude of its inputs."""
        bad = [tensor for tensor in made if not self._known.of(tensor).is_finite]
        if bad or self._behind:
            self._note_what_becomes_of_infinities(name, made, bad)
            self._follow(index, name, before, made, bad)
        self._given = ()

    def added_to_a_gradient(self, given: Sequence[torch.Tensor]) -> None:
        """To be called with what is added to the gradient of a parameter."""
        for tensor in given if self._behind else ():
            self.in_gradients |= self._still_behind(tensor)[0]

    def _still_behind(self, tensor: torch.Tensor) -> tuple[frozenset[int], bool]:
        """The ops behind the inf and NaN that a tensor holds, and whether it holds a NaN; none where its memory was
        another's: not every tensor is seen."""
        behind = self._behind.get(storage_of(tensor), NONE)
        magnitude = self._known.of(tensor) if behind else None
        if magnitude is None or magnitude.is_finite:
            return NONE, False
        return behind, magnitude.nan > 0

    def _note_what_becomes_of_infinities(
        self, name: str, made: Sequence[torch.Tensor], bad: Sequence[torch.Tensor]
    ) -> None:
        read = NONE.union(*self._infinite)
        if name in SATURATES and not bad:
            self._saturated |= read
        elif name not in ATEN_MOVES or len(read) > 1:
            self._used |= read
        if name in POLES and not bad and self._infinite:
            self.divisors |= self._infinite[-1]

    def _follow(
        self, index: int, name: str, before: Magnitude, made: Sequence[torch.Tensor], bad: Sequence[torch.Tensor]
    ) -> None:
        for tensor in made:
            self._behind.pop(storage_of(tensor), None)
        behind = frozenset({index}) if before.is_finite else NONE.union(*self._read)
        for tensor in bad:
            makes_nan = self._known.of(tensor).nan > 0 and not before.nan
            if makes_nan:  # what comes of a NaN in its turn says nothing more
                self.poisonous |= behind
            starts_here = makes_nan and (not behind or self._is_masked_throughout(name))
            self._behind[storage_of(tensor)] = behind | {index} if starts_here else behind

    def _is_masked_throughout(self, name: str) -> bool:
        """Whether a softmax makes NaN of rows of -inf, which are meant as a mask wherever they come from."""
        if name not in SOFTMAXES:
            return False
        values = (found for found in map(float_values, self._given) if found is not None)
        return not any(bool((found == math.inf).any()) for found in values)
