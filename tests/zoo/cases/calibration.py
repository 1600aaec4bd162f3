"""A healthy model whose loss scale has to come down first."""

from tests.zoo.case import Case, OneLayerTimes50

CASE = Case(follows=("scale-calibration",), steps=12)
Model = OneLayerTimes50
