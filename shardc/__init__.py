"""shardc: sharded training as a compiler. `model = shardc.compile(model, plan)`."""

from passes.errors import Error
from shardc.calibrate import calibrate
from shardc.compile import compile
from shardc.emulate import emulate
from shardc.plan import Plan
from shardc.profile import Profile, profile
from shardc.program import Program
from shardc.quantized import quantization_error
from shardc.search import search
from shardc.simulate import simulate
from shardc.strategies import strategies
from shardc.timeline import Timeline
from shardc.topology import Topology
from shardc.trace import programs, trace
from shardc.weights import load

__version__ = "0.1.0"
__all__ = [
    "Error",
    "Plan",
    "Profile",
    "Program",
    "Timeline",
    "Topology",
    "calibrate",
    "compile",
    "emulate",
    "load",
    "profile",
    "programs",
    "quantization_error",
    "search",
    "simulate",
    "strategies",
    "trace",
]
