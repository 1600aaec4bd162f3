"""The calls on a tape as a graph: what each was given and has made, and which of them a loss needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ampdbg.probes.op_trace import storage_of
from ampdbg.replay.played_step import Given, Made, TapedCall, made_in


class TapedCalls:
    """Calls in the order in which they were made, each known by its number."""

    def __init__(self) -> None:
        self.every: list[TapedCall] = []
        self._given: list[tuple[Any, Any]] = []
        self._results: list[list[torch.Tensor]] = []  # alive, or else an id is given to another tensor
        self._made: dict[int, tuple[Made, bool]] = {}

    def add(self, call: TapedCall, given: tuple[Any, Any], result: Any) -> None:
        """Puts a call behind the others, with what stands for its arguments; nothing where it has made no tensor."""
        made = list(made_in(result))
        if made:
            number = len(self.every)
            self.every.append(call)
            self._given.append(given)
            self._made.update((id(tensor), (Made(number, path), tensor.requires_grad)) for path, tensor in made)
            self._results.append([tensor for _, tensor in made])

    def have_made(self, tensor: torch.Tensor) -> bool:
        """Whether one of them has made a tensor, be it that another has led its gradients elsewhere."""
        return id(tensor) in self._made

    def maker_of(self, tensor: torch.Tensor) -> Made | None:
        """What stands for a tensor that one of them has made; None for others."""
        made, wants = self._made.get(id(tensor), (None, False))
        # A custom Function hands on what it has made without gradients, and leads them there itself.
        return made if wants == tensor.requires_grad else None

    def have_their_weights(self, made: Made) -> bool:
        """Whether all that something was made with are still the weights that they were then."""
        return all(self.every[number].has_its_weights for number in self._behind([made.call]))

    def parts_of(self, losses: Sequence[Made]) -> list[tuple[set[int], tuple[Made, ...]]]:
        """The calls that each loss needs, with that loss; all in one part where losses share a call, as one pass has
        them all then."""
        parts = [self._leading_to([loss]) for loss in losses]
        every = set().union(*parts)
        if sum(map(len, parts)) != len(every):
            return [(every, tuple(losses))]
        return [(part, (loss,)) for part, loss in zip(parts, losses, strict=True)]

    def given_to(self, part: Iterable[int]) -> Given:
        """What the calls of a part were given."""
        return {number: self._given[number] for number in sorted(part)}

    def _leading_to(self, losses: Sequence[Made]) -> set[int]:
        """The calls that these losses need, and those that write into what they need."""
        last = max(loss.call for loss in losses)
        needed = self._behind(loss.call for loss in losses)
        writers = {number for number in range(last) if self.every[number].writes}
        while more := self._writing_into(needed, writers - needed):
            needed |= self._behind(more)
        return needed

    def _writing_into(self, needed: set[int], writers: set[int]) -> list[int]:
        """Those of the writers that write into the memory of what the others have made: of a view that changes what it
        is a view of. What adds up another loss of theirs does not. Where a tensor has no memory of its own, it may."""
        memory = self._memory_of(needed)

        def may(writer: int) -> bool:
            written = self._memory_of([writer])
            return bool(self._behind([writer]) & needed) if 0 in written else not written.isdisjoint(memory)

        return [writer for writer in writers if may(writer)]

    def _memory_of(self, numbers: Iterable[int]) -> set[int]:
        return {storage_of(tensor) for number in numbers for tensor in self._results[number]}

    def _behind(self, numbers: Iterable[int]) -> set[int]:
        """The calls of these numbers, and all that they read from."""
        waiting, found = list(numbers), set[int]()
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self.every[number].reads
        return found
