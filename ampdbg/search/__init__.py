"""Minimal sets over a predicate: which pins make a step healthy. It knows neither torch nor modules, only names."""

from __future__ import annotations

from ampdbg.search.atoms import AtomTree as AtomTree
from ampdbg.search.atoms import atom_tree as atom_tree
from ampdbg.search.reduction import Result as Result
from ampdbg.search.reduction import best_so_far as best_so_far
from ampdbg.search.strategies import delta_debug as delta_debug
from ampdbg.search.strategies import guided as guided
from ampdbg.search.trials import Answer as Answer
from ampdbg.search.trials import OutOfTrials as OutOfTrials
from ampdbg.search.trials import Trials as Trials
