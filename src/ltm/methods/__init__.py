"""The methods. Importing a module here registers it."""

from ltm.methods.base import MethodConfig, config_from_dict, methods
from ltm.methods.diffrate import DiffRate
from ltm.methods.dtem import DTEM
from ltm.methods.ltm import LTM, ByFamily, Informative, Learned, Matched
from ltm.methods.ltmp import LTMP
from ltm.methods.pitome import PiToMe
from ltm.methods.tofu import ToFu
from ltm.methods.tome import ToMe

DEFAULT = LTM.name
"""The method that verbs take unless told otherwise."""
BASELINE = ToMe.name
"""The method that it is compared with."""

__all__ = [
    "BASELINE",
    "DEFAULT",
    "DTEM",
    "LTM",
    "LTMP",
    "ByFamily",
    "DiffRate",
    "Informative",
    "Learned",
    "Matched",
    "MethodConfig",
    "PiToMe",
    "ToFu",
    "ToMe",
    "config_from_dict",
    "methods",
]
