"""The methods. Importing a module here registers it."""

from ltm.methods.base import MethodConfig, config_from_dict, methods
from ltm.methods.ltm import LTM
from ltm.methods.ltmp import LTMP
from ltm.methods.tofu import ToFu
from ltm.methods.tome import ToMe

__all__ = ["LTM", "LTMP", "MethodConfig", "ToFu", "ToMe", "config_from_dict", "methods"]
