"""The YAML config: validated, frozen, every mistake reported at once with its line (no torch)."""

from ampdbg.config.file import config_of, config_of_record, load_config
from ampdbg.config.schema import Config, LossScale, OptimizerSpec, Precision, TargetSpec, Train
from ampdbg.config.targets import Target, parse_target

__all__ = [
    "Config",
    "LossScale",
    "OptimizerSpec",
    "Precision",
    "Target",
    "TargetSpec",
    "Train",
    "config_of",
    "config_of_record",
    "load_config",
    "parse_target",
]
