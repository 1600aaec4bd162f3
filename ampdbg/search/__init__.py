"""Minimal sets over a predicate: which pins make a step healthy. It knows neither torch nor modules, only names."""

from __future__ import annotations

from ampdbg.search.atoms import AtomTree as AtomTree
from ampdbg.search.atoms import atom_tree as atom_tree
from ampdbg.search.delta import delta_debug as delta_debug
from ampdbg.search.found import Found as Found
from ampdbg.search.found import best_so_far as best_so_far
from ampdbg.search.guided import guided as guided
from ampdbg.search.trial import OutOfTrials as OutOfTrials
from ampdbg.search.trial import Seen as Seen
from ampdbg.search.trial import Trials as Trials
