"""The keys of the YAML config: their types, defaults and limits.

A field's ``title`` is its meaning. Its ``description`` names the allowed values, and error messages quote it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ampdbg.config.targets import TARGET_FORMS, parse_target, why_absent, why_no_file
from ampdbg.formats import FLOAT32, FloatFormat
from ampdbg.levels import CHOICES, LEVELS, lowest_format
from ampdbg.quantities import quoted

DEVICE = "^(auto|cpu|cuda(:[0-9]{1,2}|:1[01][0-9]|:12[0-7])?)$"
"""torch stores a device index in eight bits."""


def _not_boolean(value: object) -> object:
    """Reject booleans, which Python treats as numbers but which are mistakes in a config."""
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "a boolean")
    return value


def _not_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(f"got {quoted(value)}, one string; allowed: a list of module names, written as [{value[:80]}]")
    return value


def _empty_section(value: object) -> object:
    """Treat a key with an empty body as the defaults, since everything below it may be commented out."""
    return {} if value is None else value


def _target(value: str, info: ValidationInfo) -> str:
    target = parse_target(value)
    absent = why_absent(target, info.context["folder"]) if info.context else None
    if absent:
        raise ValueError(absent)
    return value


def _saved_file(value: Path, info: ValidationInfo) -> Path:
    if info.context:
        absent = why_no_file(info.context["folder"] / value, str(value), f"*{value.suffix}")
        if absent:
            raise ValueError(absent)
    return value


def _kind_or(other: str) -> Discriminator:
    return Discriminator(lambda value: "<mapping>" if isinstance(value, (Mapping, BaseModel)) else other)


def _one_or_several(value: object) -> object:
    return value if value is None or isinstance(value, (list, tuple)) else (value,)


class _Also:
    """Adds alternatives that ampdbg's validators accept to the JSON schema of a type, such as null."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self._others = others

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        shown = handler(core)
        about = {key: shown.pop(key) for key in ("title", "description", "default") if key in shown}
        return {"anyOf": [shown, *self._others], **about}


NOTHING = _Also({"type": "null"})

TargetText = Annotated[str, AfterValidator(_target), Field(title="where it is defined", description=TARGET_FORMS)]
Number = Annotated[float, BeforeValidator(_not_boolean)]
PositiveInteger = Annotated[
    int, BeforeValidator(_not_boolean), Field(ge=1, lt=2**63, description="a whole number of at least 1, below 2**63")
]
Scale = Annotated[
    Number,
    # GradScaler stores the scale in float32.
    Field(ge=FLOAT32.smallest_normal, le=FLOAT32.largest, description="a positive number that float32 can hold"),
]
SAVED = "the path of a .pt or .safetensors file, relative to the config"
SavedFile = Annotated[Path, AfterValidator(_saved_file), PlainSerializer(Path.as_posix)]
SavedFiles = Annotated[
    Annotated[tuple[SavedFile, ...], BeforeValidator(_one_or_several), _Also({"type": "string"})] | None,
    Field(description=f"{SAVED}, or a list of them"),
]
Flag = Annotated[bool | None, Field(strict=True, description="true, false, or null for the level's default")]


Empty = BeforeValidator(_empty_section)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_bytes="base64", ser_json_inf_nan="constants")


class TargetSpec(_Section):
    """An object of the user's code: where it is defined, and the keyword arguments it is called with."""

    target: TargetText
    args: Annotated[
        dict[str, Any],
        Empty,
        NOTHING,
        Field(title="the arguments it is called with", description="a mapping of argument names to values"),
    ] = {}


class OptimizerSpec(TargetSpec):
    """The optimizer; ``groups`` makes a parameter group of each parameter, each module, or the whole model."""

    target: TargetText = "torch.optim:AdamW"
    groups: Annotated[
        Literal["parameter", "module", "single"],
        Field(
            title="what gets a parameter group: each parameter, each module, or the whole model",
            description="parameter, module or single",
        ),
    ] = "parameter"


class CheckpointFiles(_Section):
    """Files that a training script saved. Each file is the named part, or has it under a usual name."""

    model: Annotated[SavedFile | None, Field(description=SAVED)] = None
    optimizer: SavedFiles = None
    scaler: Annotated[SavedFile | None, Field(description=SAVED)] = None
    scheduler: SavedFiles = None


class LossScale(_Section):
    """A dynamic loss scale, with GradScaler's parameters and defaults, and Apex's bounds."""

    init: Annotated[Scale, Field(title="the initial scale")] = 65536.0
    growth_factor: Annotated[
        Number,
        Field(
            title="the factor by which the scale grows",
            gt=1,
            allow_inf_nan=False,
            description="a finite number above 1",
        ),
    ] = 2.0
    backoff_factor: Annotated[
        Number,
        Field(
            title="the factor by which the scale falls after an overflow",
            gt=0,
            lt=1,
            description="a number between 0 and 1, exclusive",
        ),
    ] = 0.5
    growth_interval: Annotated[PositiveInteger, Field(title="the scale grows after this many steps without a skip")] = (
        2000
    )
    min: Annotated[Scale | None, Field(title="the lowest scale")] = None
    max: Annotated[Scale | None, Field(title="the highest scale; Apex's is 2**24")] = None

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, value: float | None, info: ValidationInfo) -> float | None:
        least = info.data.get("min")
        if value is not None and least is not None and value < least:
            raise ValueError(f"got {value:g}, below min, which is {least:g}; allowed: at least that")
        return value


class Precision(_Section):
    """The dtype of each op, and the scaling of the loss (a number is a static scale)."""

    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"],
        Field(title="the autocast dtype", description="float16, bfloat16 or float32"),
    ] = "float16"
    level: Annotated[
        str, Field(title="one of Apex's levels", pattern=f"^({'|'.join(LEVELS)})$", description=CHOICES)
    ] = "O1"
    policy: Annotated[
        Literal["cuda", "native"],
        Field(
            title="which op lists autocast uses: CUDA's on any device, or the device's own",
            description="cuda or native",
        ),
    ] = "cuda"
    loss_scale: Annotated[
        Annotated[LossScale, Tag("<mapping>")] | Annotated[Scale, Tag("<number>")],
        _kind_or("<number>"),
        NOTHING,
        Field(
            title="what the loss is multiplied by",
            description="a positive number that float32 can hold (a static scale); or a mapping of init, "
            "growth_factor, backoff_factor, growth_interval, min, max (a dynamic one)",
        ),
    ] = LossScale()
    pins: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_not_text),
        BeforeValidator(lambda value: () if value is None else value),
        NOTHING,
        Field(
            title="the modules that run in FP32",
            description="a list of module names, fnmatch patterns allowed; NAME:own pins a module's own lines only",
        ),
    ] = ()
    keep_norms_fp32: Flag = None
    master_weights: Flag = None

    @model_validator(mode="before")
    @classmethod
    def _loss_scale_of_level(cls, given: Any) -> Any:
        """Fill in the level's defaults for the loss scale."""
        level = LEVELS.get(str(given.get("level", "O1"))) if isinstance(given, Mapping) else None
        if level is None:
            return given
        scale = given.get("loss_scale")
        if scale is None:
            return {**given, "loss_scale": level.loss_scale}
        if isinstance(scale, Mapping) and isinstance(level.loss_scale, Mapping):
            return {**given, "loss_scale": {**level.loss_scale, **scale}}
        return given

    @field_validator("keep_norms_fp32", "master_weights")
    @classmethod
    def _only_of_half_weights(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        level = LEVELS.get(info.data.get("level", ""))
        if value is not None and level is not None and not level.has_half_weights:
            levels = ", ".join(name for name, other in LEVELS.items() if other.has_half_weights)
            raise ValueError(
                f"got {str(value).lower()} at level {level.name}; allowed at {levels}, whose weights are half"
            )
        return value

    @property
    def has_half_weights(self) -> bool:
        return LEVELS[self.level].has_half_weights

    @property
    def format(self) -> FloatFormat:
        return lowest_format(self.level, self.dtype)


class Train(_Section):
    """How long to train, and where. ``clip_grad_norm`` is applied to unscaled gradients."""

    steps: Annotated[PositiveInteger, Field(title="optimizer steps")] = 50
    accumulate: Annotated[PositiveInteger, Field(title="micro-batches per step")] = 1
    clip_grad_norm: Annotated[
        Annotated[Number, Field(gt=0)] | None,
        Field(
            title="clip the norm of the unscaled gradients to this",
            description="a number above 0, or null for no clipping",
        ),
    ] = None
    seed: Annotated[
        int,
        BeforeValidator(_not_boolean),
        Field(
            title="the random seed of Python, NumPy and torch",
            ge=0,
            lt=2**32,
            description="a whole number from 0 to 2**32 - 1",
        ),
    ] = 0
    device: Annotated[
        str, Field(title="where to run", pattern=DEVICE, description="auto, cpu, cuda or cuda:INDEX, up to 127")
    ] = "auto"


class ConfigFile(_Section):
    """The contents of a config file."""

    model: Annotated[
        TargetSpec,
        Field(
            title="the model to train", description="an nn.Module class, factory or instance: {target: FILE.py:NAME}"
        ),
    ]
    data: Annotated[
        TargetSpec,
        Field(
            title="the data to train on",
            description="an iterable of batches, or a factory of one: {target: FILE.py:NAME}",
        ),
    ]
    loss: Annotated[
        TargetSpec | None,
        Field(title="loss(output, target), a scalar; not needed where the model's output is or carries the loss"),
    ] = None
    step: Annotated[
        TargetSpec | None,
        Field(title="step(model, batch), a scalar or {name: loss}, instead of the model's call and the loss"),
    ] = None
    optimizer: Annotated[OptimizerSpec, Empty, NOTHING, Field(title="the optimizer of the weights")] = OptimizerSpec()
    checkpoint: Annotated[
        Annotated[
            Annotated[CheckpointFiles, Tag("<mapping>")] | Annotated[SavedFile, Tag("<path>")],
            _kind_or("<path>"),
        ]
        | None,
        Field(
            title="the weights to start from; ampdbg unpickles tensors only",
            description=f"{SAVED}, or a mapping of {', '.join(CheckpointFiles.model_fields)} to such paths",
        ),
    ] = None
    scheduler: Annotated[
        TargetSpec | None, Field(title="scheduler(optimizer), stepped after each step that was not skipped")
    ] = None
    precision: Annotated[
        Precision, Empty, NOTHING, Field(title="which dtype each op gets, and how the loss is scaled")
    ] = Precision()
    train: Annotated[Train, Empty, NOTHING, Field(title="how long to train, and where")] = Train()


class Config(ConfigFile):
    """A valid config and its origin.

    ``FILE.py`` targets and ``checkpoint`` are relative to ``folder``, the config's folder. ``start`` is the working
    folder at load time. Both are absolute, since user code may change the working folder. ``continues_scale`` is true
    if the checkpoint's loss scale replaces the config's. ``places`` has the origin of each key: ``"config.yaml:3"`` or
    ``"--set train.steps=9"``.
    """

    folder: Path
    start: Path
    places: Mapping[str, str] = {}
    continues_scale: bool = True

    def where(self, key: str) -> str:
        """Return a key's name for messages, ``"config.yaml:3: model.target"``, with its own line or its section's."""
        above = key
        while above and above not in self.places:
            above = above.rpartition(".")[0]
        return f"{self.places[above]}: {key}" if above else key

    def targets(self) -> dict[str, TargetSpec]:
        """Return the config's targets by key."""
        values = {key: getattr(self, key) for key in ConfigFile.model_fields}
        return {key: value for key, value in values.items() if isinstance(value, TargetSpec)}

    def target_files(self) -> tuple[Path, ...]:
        """Return the files of the targets, without duplicates."""
        targets = (parse_target(spec.target) for spec in self.targets().values())
        return tuple(dict.fromkeys(target.path(self.folder) for target in targets if target.file))

    def resolved(self) -> dict[str, Any]:
        """Return all keys, including defaults, as plain data. Paths stay as written."""
        return self.model_dump(mode="json", exclude={"folder", "start", "places", "continues_scale"})

    def folder_from_start(self) -> str:
        """Return the config's folder for a record: relative to the start folder, with forward slashes."""
        try:
            return Path(os.path.relpath(self.folder, self.start)).as_posix()
        except ValueError:  # another drive on Windows
            return self.folder.as_posix()


THE_SCRIPT = "the_script"
"""The target name of a model that a script creates itself."""


def config_of_script(precision: Precision, clip_grad_norm: float | None = None) -> Config:
    """Return the config of a script's step, in which the script itself creates the targets."""
    script = TargetSpec(target=f"__main__:{THE_SCRIPT}")
    train = Train(clip_grad_norm=clip_grad_norm)
    return Config(model=script, data=script, precision=precision, train=train, folder=Path.cwd(), start=Path.cwd())


DIALECT = "https://json-schema.org/draft/2020-12/schema"

LIMITS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
"""JSON schema's names of limits, for fields where a validator runs before pydantic's own checks."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema: keys, types, limits and defaults. Each ``description`` names the allowed values."""
    schema: dict[str, Any] = _spelled(ConfigFile.model_json_schema())
    about = "The config of ampdbg, the precision debugger for PyTorch mixed-precision training."
    return {"$schema": DIALECT, **schema, "title": "ampdbg", "description": about}


def _spelled(value: Any, *, is_names: bool = False) -> Any:
    """Return the schema without titles that only repeat a key, and with standard names of limits."""
    if isinstance(value, Mapping):
        return {
            key if is_names else LIMITS.get(key, key): _spelled(
                item, is_names=not is_names and key in ("properties", "$defs")
            )
            for key, item in value.items()
            if is_names or key != "title" or not item[:1].isupper()
        }
    return [_spelled(item) for item in value] if isinstance(value, list) else value
