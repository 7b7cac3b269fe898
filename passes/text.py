"""The text form of a graph: a subset of Python, `name: type = op(args)`. `passes.parse` reads it back.

    device = 'cuda:0'
    s0 = Sym(16)
    _tensor_constant0: i64[2] = tensor([3, 5])

    def forward(w: bf16[64, 512], v: bf16[512, 8] @ [1, 512], x: bf16[s0, 512], n: Sym(s0), p: f32 @ 'cpu'):
        'blocks.0.mlp'
        a: bf16[512, 512] = all_gather(w, 'node', 8, purpose='gather', params=['blocks.0.w1'], again=True)
        f: bf16[512, 512] = wait(a)
        y: bf16[s0, 512] = mm(x, f)
        ''
        z: f32[s0, 512] = prims.convert_element_type(y, f32)
        t = topk(z, 2)
        u: f32[s0, 2] = t[0]
        c: i64[2] = _tensor_constant0
        m: Sym(2*s0) = operator.mul(n, 2)
        q: f32[s0, 2] = add.Tensor(u, c, alpha=inf)
        return [q, None, [m]]

Before the `def` stands what the graph closes over: the device of its inputs where that is not cpu, symbols with their
hints, constants, and as `def`s of their own the bodies of higher-order ops and the regions (`passes.regions`) it calls.
Ops: `mm` is aten.mm.default and `add.Tensor` is aten.add.Tensor; shardc's own ops are bare too, but where aten
has the name (`shardc.expand`); all others carry their namespace. A Python keyword gets an underscore (`random.from_`).
Modules: a bare string says the module that the calls below it belong to; '' is the root, None says that they have none.
A graph without modules has no such lines.
Types: dtype, dims; then, of inputs and constants only, `@ [strides]` where not contiguous and `@ 'device'` where it
is not the graph's. A value that is no tensor is `Sym(expression)`; several values at once have no type.
Not in the text: storage offsets and aliasing of inputs, large constants (`tensor(...)`), and `meta` but for `val` and
`module`.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from passes.errors import Error
from passes.regions import Region

_DTYPES = (
    "f64=float64 f32=float32 f16=float16 bf16=bfloat16 f8e4m3=float8_e4m3fn f8e5m2=float8_e5m2 "
    "f8e4m3fnuz=float8_e4m3fnuz f8e5m2fnuz=float8_e5m2fnuz f8e8m0=float8_e8m0fnu f4e2m1x2=float4_e2m1fn_x2 "
    "i64=int64 i32=int32 i16=int16 i8=int8 u64=uint64 u32=uint32 u16=uint16 u8=uint8 b8=bool "
    "c128=complex128 c64=complex64 c32=complex32"
)
DTYPES: dict[str, torch.dtype] = {
    short: getattr(torch, full) for short, full in (pair.split("=") for pair in _DTYPES.split())
}
"""Short names of dtypes."""

_FORMATS = ("strided", "contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
WORDS: dict[str, Any] = {
    **DTYPES,
    **{name: getattr(torch, name) for name in _FORMATS},
    "inf": math.inf,
    "nan": math.nan,
}
"""What a bare name means where a value stands, unless a node has that name; nodes never print with one of them."""

NAMESPACES = ("aten", "prims", "shardc", "higher_order", "quantized_decomposed", "_c10d_functional", "inductor")
"""Where ops are looked up."""

_FUNCTIONS = {
    operator: "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ not_ getitem",
    math: "ceil floor trunc",
    torch: "sym_max sym_min sym_int sym_float sym_not sym_ite sym_sum",
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name) for module, names in _FUNCTIONS.items() for name in names.split()
}
"""Python functions that tracing writes for arithmetic on sizes."""

# A symbol without a hint (data-dependent) is read back with one; 8192 is what Inductor assumes for it too.
_NO_HINT = 8192
_SMALL_NUMEL = 64
_LINE_LENGTH = 120
_SPELLING = {value: name for name, value in WORDS.items() if not isinstance(value, float)}
_FUNCTION_NAMES = {function: name for name, function in FUNCTIONS.items()}
# fx renames the nodes that carry one of these, so a text with them would not read back as it is.
_RESERVED = {*keyword.kwlist, *dir(builtins), *WORDS, "torch", "device", "NoneType", "fx_pytree", "pytree"}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def to_text(graph: fx.Graph, name: str = "forward") -> str:
    """Print a graph.

    def forward(x: f32[4]):
        y: f32[4] = relu(x)
        return [y]
    """
    around = _Around(graph, name)
    main = _definition(graph, name, around)
    blocks = ["\n".join(around.lines), *around.bodies, main]
    return "\n\n".join(block for block in blocks if block) + "\n"


def same(a: fx.Graph, b: fx.Graph) -> bool:
    """True where both have the same nodes in the same order: ops, arguments, names, shapes, dtypes, strides."""
    return to_text(a) == to_text(b) and _strides(a) == _strides(b)


def line_of(node: fx.Node) -> str:
    """A node as it prints in its graph; of a placeholder, its name and type."""
    around, names = _Around(node.graph, "forward"), _names(node.graph)
    if node.op == "placeholder":
        return _input(node, names, around)
    # Constants and bodies get their names in the order in which they are printed.
    _definition(node.graph, "forward", around)
    return _line(node, names, around)


def value_of(node: fx.Node) -> Any:
    """`meta["val"]`; tracing leaves it out of some getitem nodes, whose value is a part of their argument's."""
    if "val" in node.meta or node.target is not operator.getitem:
        return node.meta.get("val")
    of, index = node.args
    whole = value_of(of) if isinstance(of, fx.Node) else None
    return whole[index] if isinstance(whole, list | tuple) and isinstance(index, int) else None


def contiguous(dims: Iterable[Any]) -> list[Any]:
    """Strides of a contiguous tensor: [8, 4] -> [4, 1]."""
    strides: list[Any] = []
    step: Any = 1
    for dim in reversed(list(dims)):
        strides.append(step)
        step = step * (max(dim, 1) if isinstance(dim, int) else dim)
    return strides[::-1]


@cache
def is_aten(name: str) -> bool:
    """True where a bare name is an op of aten. TorchScript's do not count: one of them is a `wait`."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    return any(is_dispatched(getattr(packet, overload)) for overload in packet.overloads())


def is_dispatched(op: OpOverload) -> bool:
    """False for TorchScript's own ops: torch.ops finds them too, but no fake mode sees them."""
    return torch._C._dispatch_has_kernel(op.name())


def escape(word: str) -> str:
    """A Python keyword gets an underscore: from -> from_."""
    return word + "_" if keyword.iskeyword(word) else word


class _Around:
    """What the text says before the main `def`, and the names it uses there."""

    def __init__(self, graph: fx.Graph, name: str):
        self.device = _device(graph)
        self.lines = [] if self.device == "cpu" else [f"device = {self.device!r}"]
        self.bodies: list[str] = []
        self._names: dict[int, str] = {}
        self._taken = {name, *keyword.kwlist}
        self._symbols: set[str] = set()

    def name(self, node: fx.Node) -> str:
        """Name of the constant or body that a get_attr node refers to; printed when first met."""
        target = str(node.target)
        thing = _attribute(node.graph.owning_module, target)
        if thing is None:
            return _identifier(target)
        if id(thing) not in self._names:
            # A body's own bodies come first, so it is printed before it gets its place.
            self._names[id(thing)] = free = self._free(_identifier(target))
            self._print(free, thing, node.meta.get("val", thing))
        return self._names[id(thing)]

    def region(self, region: Region) -> str:
        """Name of a region; printed when first called."""
        if id(region) not in self._names:
            self._names[id(region)] = name = self._free(region.name)
            self.bodies.append(_definition(region.graph.graph, name, self))
        return self._names[id(region)]

    def declare(self, value: Any) -> None:
        """Print the symbols of an input that are not yet printed."""
        for part in _sizes(value):
            if isinstance(part, torch.SymInt):
                self._declare(part)

    def _declare(self, size: torch.SymInt) -> None:
        hints = size.node.shape_env.backed_var_to_val
        for symbol in sorted(size.node.expr.free_symbols, key=str):
            if str(symbol) not in self._symbols:
                self._symbols.add(str(symbol))
                self.lines.append(f"{symbol} = Sym({int(hints.get(symbol, _NO_HINT))})")

    def _print(self, name: str, thing: Any, value: Any) -> None:
        if isinstance(thing, fx.GraphModule):
            self.bodies.append(_definition(thing.graph, name, self))
        elif isinstance(thing, torch.Tensor):
            # A parsed constant stays on the cpu where its device is missing; its value says the device it is meant for.
            self.lines.append(f"{name}: {_input_type(value, self.device)} = tensor({_data(thing)})")

    def _free(self, name: str) -> str:
        name = _unused(name, self._taken)
        self._taken.add(name)
        return name


def _definition(graph: fx.Graph, name: str, around: _Around) -> str:
    names = _names(graph)
    lines = [_header(graph, name, names, around)]
    for node in graph.nodes:
        if node.op != "placeholder":
            lines += [f"    {line}" for line in (*_marker(node), _line(node, names, around))]
    return "\n".join(lines)


def _marker(node: fx.Node) -> list[str]:
    """The module of a call, where it is another one than that of the call before."""
    if node.op != "call_function":
        return []
    module, before = node.meta.get("module"), _call_before(node)
    return [repr(module)] if module != (before and before.meta.get("module")) else []


def _call_before(node: fx.Node) -> fx.Node | None:
    node = node.prev
    while node.op not in ("call_function", "root"):
        node = node.prev
    return node if node.op == "call_function" else None


def _header(graph: fx.Graph, name: str, names: dict[fx.Node, str], around: _Around) -> str:
    inputs = [_input(node, names, around) for node in graph.nodes if node.op == "placeholder"]
    line = f"def {name}({', '.join(inputs)}):"
    if len(line) <= _LINE_LENGTH:
        return line
    return "\n".join([f"def {name}(", *(f"    {it}," for it in inputs), "):"])


def _input(node: fx.Node, names: dict[fx.Node, str], around: _Around) -> str:
    if "val" not in node.meta:
        return names[node]
    around.declare(node.meta["val"])
    return f"{names[node]}: {_input_type(node.meta['val'], around.device)}"


def _line(node: fx.Node, names: dict[fx.Node, str], around: _Around) -> str:
    if node.op == "output":
        return f"return {_value(node.args[0], names)}"
    type_ = _type(value_of(node))
    return f"{names[node]}{type_ and f': {type_}'} = {_right_side(node, names, around)}"


def _right_side(node: fx.Node, names: dict[fx.Node, str], around: _Around) -> str:
    if node.op == "get_attr":
        return around.name(node)
    if node.op != "call_function":
        raise Error(f"`{node.name}` is a {node.op}; the text form has ops only", fix="print a graph of ATen ops")
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and type(node.args[1]) is int:
        return f"{names[node.args[0]]}[{node.args[1]}]"
    args = [_value(arg, names) for arg in node.args]
    args += [f"{escape(key)}={_value(arg, names)}" for key, arg in node.kwargs.items()]
    name = around.region(node.target) if isinstance(node.target, Region) else _op(node.target)
    return f"{name}({', '.join(args)})"


@cache
def _op(target: Any) -> str:
    """aten.mm.default -> mm, aten.random.from -> random.from_, prims.iota.default -> prims.iota."""
    parts = _path(target).split(".")
    if parts[0] == "aten" or (parts[0] == "shardc" and not is_aten(parts[1])):
        parts = parts[1:]
    if isinstance(target, OpOverload) and parts[-1] == "default":
        parts = parts[:-1]
    return ".".join(map(escape, parts))


def _path(target: Any) -> str:
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, OpOverload):
        return str(target)
    return _FUNCTION_NAMES.get(target) or f"{target.__module__}.{target.__name__}"


def _value(arg: Any, names: dict[fx.Node, str]) -> str:
    """An argument."""
    if isinstance(arg, fx.Node):
        return names[arg]
    if arg is None or isinstance(arg, bool | int | float | str):
        return repr(arg)
    if isinstance(arg, list):
        return f"[{', '.join([_value(it, names) for it in arg])}]"
    if isinstance(arg, tuple):
        return f"({', '.join([_value(it, names) for it in arg])}{',' if len(arg) == 1 else ''})"
    if isinstance(arg, dict):
        return f"{{{', '.join([f'{key!r}: {_value(it, names)}' for key, it in arg.items()])}}}"
    if isinstance(arg, slice):
        return f"slice({', '.join([_value(it, names) for it in (arg.start, arg.stop, arg.step)])})"
    return _word(arg)


def _word(arg: Any) -> str:
    """An argument that is no container: a dtype, a device, an op."""
    if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
        return _SPELLING.get(arg) or f"opaque({str(arg)!r})"
    if isinstance(arg, torch.device):
        return f"device({str(arg)!r})"
    if isinstance(arg, complex):
        return f"complex({arg.real!r}, {arg.imag!r})"
    if isinstance(arg, _SYMBOLIC):
        return _type(arg)
    if isinstance(arg, OpOverload | HigherOrderOperator):
        return ".".join(map(escape, _path(arg).split(".")))
    return f"opaque({str(arg)!r})"


def _type(value: Any) -> str:
    """bf16[4, 8]; f32 for 0-dim; Sym(2*s0); empty for what has no type."""
    if isinstance(value, torch.Tensor):
        return _dtype(value) + (_list(value.shape) if value.dim() else "")
    if isinstance(value, (bool, int, float, *_SYMBOLIC)):
        return f"Sym({value})"
    return ""


def _input_type(value: Any, device: str) -> str:
    """The type of something that no op computes, so it must say all: `f32[4, 8] @ [1, 4] @ 'cpu'`."""
    if value is None:
        return "None"
    if not isinstance(value, torch.Tensor):
        return _type(value) or f"opaque({type(value).__name__!r})"
    strides, dims = _list(value.stride()), _list(contiguous(value.shape))
    odd_strides = f" @ {strides}" if strides != dims else ""
    odd_device = f" @ {str(value.device)!r}" if str(value.device) != device else ""
    return _type(value) + odd_strides + odd_device


def _dtype(value: torch.Tensor) -> str:
    return _SPELLING.get(value.dtype) or str(value.dtype).removeprefix("torch.")


def _list(sizes: Iterable[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _data(tensor: torch.Tensor) -> str:
    """Elements of a constant, or `...` where they are many or not at hand."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.numel() > _SMALL_NUMEL:
        return "..."
    with unset_fake_temporarily():
        return _value(tensor.tolist(), {})


def _device(graph: fx.Graph) -> str:
    """Where most of the inputs are."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    devices = Counter(str(value.device) for value in values if isinstance(value, torch.Tensor))
    return devices.most_common(1)[0][0] if devices else "cpu"


def _sizes(value: Any) -> list[Any]:
    return [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]


def _strides(graph: fx.Graph) -> list[str]:
    return [_list(value.stride()) for value in map(value_of, graph.nodes) if isinstance(value, torch.Tensor)]


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Names of nodes; one that the text form needs for itself gets underscores."""
    names = {node: node.name for node in graph.nodes}
    taken = {*names.values(), *_RESERVED}
    for node in [node for node, name in names.items() if name in _RESERVED]:
        names[node] = _unused(node.name, taken)
        taken.add(names[node])
    return names


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _identifier(target: str) -> str:
    return target.replace(".", "_")


def _attribute(owner: Any, target: str) -> Any:
    for part in target.split("."):
        owner = getattr(owner, part, None)
    return owner
