"""Read the text form (`passes.text`) back into a graph.

Texts come from bug reports, so nothing in them is run: literals, known names and known ops only. Types are
recomputed on fake tensors, never believed, so a wrong one shows as a difference when the graph is printed again.
"""

from __future__ import annotations

import ast
import keyword
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes import ops as _ops  # noqa: F401  defines the shardc namespace
from passes.errors import Error
from passes.regions import Region, region_of
from passes.text import DTYPES, FUNCTIONS, NAMESPACES, WORDS, contiguous, is_aten, is_dispatched

_MAX_SIZE = 2**63 - 1
_MAX_POWER = 8
_FORM = "write lines of the form `name: type = op(args)`"
_SPELL_OPS = "ops are spelled mm, add.Tensor, prims.iota, higher_order.cond, operator.mul"
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: a // b % c,
}
_MAKERS: dict[str, Callable[..., Any]] = {"device": torch.device, "slice": slice, "complex": complex}


def parse(text: str) -> fx.Graph:
    """Read a graph.

    def forward(x: f32[4]):
        y: f32[4] = relu(x)
        return [y]

    `meta` is `val`, recomputed, and `module` where the text says it. Constants and bodies of higher-order ops are
    attributes of `graph.owning_module`, so `fx.GraphModule(graph.owning_module, graph)` runs. Calls of regions are
    calls of `passes.regions.Region` objects, one for each `def`.
    """
    with unset_fake_temporarily(), torch.no_grad(), _quiet():
        return _Text(textwrap.dedent(text)).read()


class _Text:
    """One text: what stands before the main `def`, and where things are in it."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.device = "cpu"
        # A fallback kernel would run on real memory; a body's constants are real tensors.
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.symbols: dict[str, Any] = {}
        self.constants: dict[str, tuple[torch.Tensor, Any]] = {}
        self.graphs: dict[str, fx.Graph] = {}
        self.bodies: dict[str, fx.GraphModule] = {}
        self.regions: dict[str, Region] = {}

    def read(self) -> fx.Graph:
        for statement in self._syntax():
            with self.trouble("this cannot be read", statement):
                self._statement(statement)
        if not self.graphs:
            raise Error("the text has no `def`", fix="a text ends with `def forward(x: f32[4]): ...`")
        *others, main = self.graphs
        for name in others:
            if name not in self.bodies and name not in self.regions:
                raise Error(f"`{name}` is not used by `{main}`", fix="one text is one graph: parse them one by one")
        return self.graphs[main]

    def body(self, name: str) -> fx.GraphModule:
        """A graph that another one refers to, as a module: the same one for all who do."""
        if name not in self.bodies:
            owner: Any = self.graphs[name].owning_module
            self.bodies[name] = fx.GraphModule(owner, self.graphs[name])
        return self.bodies[name]

    def region(self, name: str) -> Region:
        """A graph that another one calls: the same one for all who do."""
        if name not in self.regions:
            self.regions[name] = region_of(self.graphs[name], name)
        return self.regions[name]

    def where(self, node: ast.AST) -> str:
        return self.where_line(getattr(node, "lineno", 1))

    def where_line(self, number: int) -> str:
        line = self.lines[number - 1].strip() if number <= len(self.lines) else ""
        return f"line {number}: {textwrap.shorten(line, 100)}"

    def refusal(self, node: ast.AST, fix: str = _FORM) -> Error:
        source = ast.unparse(node).split("\n")[0]
        return Error(f"`{textwrap.shorten(source, 60)}` is not in the text form", where=self.where(node), fix=fix)

    @contextmanager
    def trouble(self, what: str, node: ast.AST) -> Iterator[None]:
        """Turn whatever torch raises into an Error at this line."""
        try:
            yield
        except Error:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise Error(f"{what}: {reason}", where=self.where(node)) from error

    def _syntax(self) -> list[ast.stmt]:
        try:
            return ast.parse("\n".join(self.lines)).body
        except SyntaxError as error:
            raise Error(f"not Python: {error.msg}", where=self.where_line(error.lineno or 1), fix=_FORM) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise Error(f"not Python: {error}", fix=_FORM) from None

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign([ast.Name("device")], ast.Constant(str(device))):
                self.device = device
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("Sym"), [ast.Constant(int(hint))], [])):
                self.symbols[name] = self._symbol(name, hint, node)
            case ast.AnnAssign(ast.Name(name), annotation, ast.Call(ast.Name("tensor"), [data], [])):
                self.constants[name] = self._constant(name, annotation, data)
            case ast.FunctionDef():
                self._define(node)
            case _:
                raise self.refusal(node)

    def _symbol(self, name: str, hint: int, node: ast.stmt) -> Any:
        if hint < 2:
            raise Error(f"`{name}` has hint {hint}; a symbolic size is 2 or more", where=self.where(node))
        if name in self.symbols:
            raise Error(f"symbol `{name}` is declared twice", where=self.where(node))
        env, symbol = self.mode.shape_env, sympy.Symbol(name, positive=True, integer=True)
        assert env is not None
        env.add_backed_var_to_val(symbol, hint)
        env.constrain_symbol_range(symbol, compiler_min=2, compiler_max=_MAX_SIZE)
        return env.create_symintnode(symbol, hint=hint)

    def _constant(self, name: str, annotation: ast.expr, data: ast.expr) -> tuple[torch.Tensor, Any]:
        if isinstance(data, ast.Constant) and data.value is ...:
            raise Error(
                f"the elements of `{name}` are not in the text",
                where=self.where(data),
                fix=f"make `{name}` an argument of the `def`, or write its elements",
            )
        value = _Type(self).read(annotation)
        with self.trouble(f"`{name}` cannot be made", data):
            elements = torch.tensor(_Function(self, name).value(data), dtype=value.dtype).reshape(value.shape)
            tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(elements)
        return _on(tensor, value.device), value

    def _define(self, node: ast.FunctionDef) -> None:
        if node.name in self.graphs:
            raise Error(f"`{node.name}` is defined twice", where=self.where(node), fix="rename one")
        with self.mode:
            self.graphs[node.name] = _Function(self, node.name).read(node)


class _Type:
    """An annotation, as the value that it describes."""

    def __init__(self, text: _Text):
        self.text = text

    def read(self, node: ast.expr) -> Any:
        """`f32[4, 8] @ [1, 4] @ 'cpu'` -> a fake tensor; `Sym(2*s0)` -> a SymInt; `None` -> None."""
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        with self.text.trouble(f"`{ast.unparse(node)}` is no type", node), self.text.mode:
            if (size := self._sym(node)) is not None:
                return size
            base, at = self._split(node)
            dtype, dims = self._dims(base)
            strides = at[list] if list in at else contiguous(dims)
            return torch.empty_strided(dims, strides, dtype=dtype, device=at.get(str, self.text.device))

    def size(self, node: ast.expr) -> Any:
        """`2*s0` -> a SymInt."""
        match node:
            case ast.Constant(bool() | int() | float() as value):
                return value
            case ast.Name(name):
                return self._symbol(name, node)
            case ast.UnaryOp(ast.USub(), operand):
                return -self.size(operand)
            case ast.BinOp(left, ast.Pow(), ast.Constant(int(power))) if 0 <= power <= _MAX_POWER:
                return self.size(left) ** power
            case ast.BinOp(left, operation, right) if type(operation) in _ARITHMETIC:
                return _ARITHMETIC[type(operation)](self.size(left), self.size(right))
            case ast.Call(ast.Name(name), args, []) if name in _SIZE_FUNCTIONS:
                return _SIZE_FUNCTIONS[name](*map(self.size, args))
        raise self.text.refusal(node, "a size is a number, a symbol, or +, -, *, //, %, **, Max, Min of sizes")

    def _symbol(self, name: str, node: ast.expr) -> Any:
        if name not in self.text.symbols:
            fix = f"say its hint before the `def`: {name} = Sym(16)"
            raise Error(f"symbol `{name}` is not declared", where=self.text.where(node), fix=fix)
        return self.text.symbols[name]

    def _sym(self, node: ast.expr) -> Any:
        match node:
            case ast.Call(ast.Name("Sym"), [expression], []):
                return self.size(expression)
        return None

    def _split(self, node: ast.expr) -> tuple[ast.expr, dict[type, Any]]:
        """`f32[4, 8] @ [1, 4] @ 'cpu'` -> `f32[4, 8]`, {list: [1, 4], str: 'cpu'}"""
        at: dict[type, Any] = {}
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            kind, value = self._at(node.right)
            node, at[kind] = node.left, value
        return node, at

    def _at(self, node: ast.expr) -> tuple[type, Any]:
        match node:
            case ast.List(elts):
                return list, [self.size(it) for it in elts]
            case ast.Constant(str(device)):
                return str, device
        raise self.text.refusal(node, "write f32[4, 8] @ [1, 4] for strides, f32[4, 8] @ 'cpu' for a device")

    def _dims(self, node: ast.expr) -> tuple[torch.dtype, list[Any]]:
        match node:
            case ast.Name(dtype) if dtype in DTYPES:
                return DTYPES[dtype], []
            case ast.Subscript(ast.Name(dtype), ast.Tuple(dims)) if dtype in DTYPES:
                return DTYPES[dtype], [self.size(dim) for dim in dims]
            case ast.Subscript(ast.Name(dtype), dim) if dtype in DTYPES:
                return DTYPES[dtype], [self.size(dim)]
        raise self.text.refusal(node, f"a type is a dtype and dims, f32[4, 8]; dtypes: {', '.join(DTYPES)}")


class _Function:
    """One `def`: a graph while it is read, its nodes by name, and what each of them is on fake tensors."""

    def __init__(self, text: _Text, name: str):
        self.text = text
        self.name = name
        self.owner: Any = torch.nn.Module()
        self.graph = fx.Graph(owning_module=self.owner)
        self.nodes: dict[str, fx.Node] = {}
        self.results: dict[fx.Node, Any] = {}
        self.module: str | None = None

    def read(self, node: ast.FunctionDef) -> fx.Graph:
        self._inputs(node)
        for statement in node.body[:-1]:
            self._statement(statement)
        self._return(node.body[-1])
        return self.graph

    def value(self, node: ast.expr) -> Any:
        """An argument of an op."""
        match node:
            case ast.Name(name):
                return self._named(name, node)
            case ast.Constant(None | bool() | int() | float() | str() as value):
                return value
            case ast.List(elts):
                return [self.value(it) for it in elts]
            case ast.Tuple(elts):
                return tuple([self.value(it) for it in elts])
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float()) | ast.Name("inf")):
                return -self.value(node.operand)
            case ast.Dict(keys, values) if None not in keys:
                return {self.value(key): self.value(it) for key, it in zip(keys, values, strict=True) if key}
            case ast.Attribute():
                return self._op(node)
            case ast.Call(ast.Name("Sym"), [_], []):
                return _Type(self.text).read(node)
            case ast.Call(ast.Name(name), args, []) if name in _MAKERS:
                with self.text.trouble(f"`{ast.unparse(node)}` is no value", node):
                    return _MAKERS[name](*map(self.value, args))
        raise self.text.refusal(
            node, "an argument is a literal, a name or a list of them; give every op a line of its own"
        )

    def _inputs(self, node: ast.FunctionDef) -> None:
        it = node.args
        if node.decorator_list or it.posonlyargs or it.kwonlyargs or it.vararg or it.kwarg or it.defaults:
            raise self.text.refusal(node, f"write `def {self.name}(x: f32[4], ...):` with plain arguments")
        for arg in it.args:
            if arg.annotation is None:
                fix = f"write `{arg.arg}: f32[4, 8]`"
                raise Error(f"argument `{arg.arg}` has no type", where=self.text.where(arg), fix=fix)
            value = _Type(self.text).read(arg.annotation)
            self._add(arg.arg, arg, value, "placeholder", arg.arg)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign([ast.Name(name)], right) | ast.AnnAssign(ast.Name(name), _, right) if right is not None:
                self._assign(name, right)
            case ast.Expr(ast.Constant(None | str() as module)):
                self.module = module
            case _:
                raise self.text.refusal(node)

    def _assign(self, name: str, right: ast.expr) -> None:
        match right:
            case ast.Call(op, args, kwargs):
                self._call(name, right, op, args, kwargs)
            case ast.Subscript(ast.Name() as whole, index):
                arguments = (self.value(whole), self.value(index))
                self._run(name, right, FUNCTIONS["operator.getitem"], arguments, {})
            case ast.Name(attribute):
                self._attribute(name, right, attribute)
            case _:
                raise self.text.refusal(right)

    def _call(self, name: str, node: ast.expr, op: ast.expr, args: list[ast.expr], kwargs: list[ast.keyword]) -> None:
        target = self._op(op)
        if isinstance(target, Region):
            target.modules.append(self.module or "")
        arguments = tuple([self.value(arg) for arg in args])
        if any(it.arg is None for it in kwargs):
            raise self.text.refusal(node)
        self._run(name, node, target, arguments, {_unescape(str(it.arg)): self.value(it.value) for it in kwargs})

    def _run(self, name: str, node: ast.expr, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.text.trouble(f"`{name}` cannot be computed", node):
            value = target(*fx.map_arg(args, self.results.get), **fx.map_arg(kwargs, self.results.get))
        self._add(name, node, value, "call_function", target, args, kwargs)

    def _attribute(self, name: str, node: ast.expr, attribute: str) -> None:
        thing: torch.Tensor | fx.GraphModule
        if attribute in self.text.constants:
            thing, value = self.text.constants[attribute]
        elif attribute in self.text.graphs:
            thing = value = self.text.body(attribute)
        else:
            fix = "a constant or body stands before the `def`; a value has one name only"
            raise Error(f"`{attribute}` is no constant and no body", where=self.text.where(node), fix=fix)
        setattr(self.owner, attribute, thing)
        self._add(name, node, value, "get_attr", attribute)

    def _return(self, node: ast.stmt) -> None:
        if not isinstance(node, ast.Return) or node.value is None:
            raise self.text.refusal(node, f"`{self.name}` ends with `return [...]`")
        self.graph.output(self.value(node.value))

    def _add(
        self, name: str, node: ast.AST, value: Any, op: str, target: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        if name in self.nodes:
            raise Error(f"`{name}` is assigned twice", where=self.text.where(node), fix="give every value its own name")
        added = self.graph.create_node(op, target, args, kwargs or {}, name=name)
        if not isinstance(value, fx.GraphModule):
            added.meta["val"] = value
        if op == "call_function" and self.module is not None:
            added.meta["module"] = self.module
        self.nodes[name], self.results[added] = added, value

    def _named(self, name: str, node: ast.expr) -> Any:
        if name in self.nodes:
            return self.nodes[name]
        if name in WORDS:
            return WORDS[name]
        raise Error(f"`{name}` is not defined", where=self.text.where(node), fix="define it on an earlier line")

    def _op(self, node: ast.expr) -> Any:
        path = _dotted(node)
        if not path:
            raise self.text.refusal(node, _SPELL_OPS)
        found = _find(path)
        if found is None and ".".join(path) in self.text.graphs:
            return self.text.region(path[0])
        if found is None:
            raise Error(f"unknown op `{'.'.join(path)}`", where=self.text.where(node), fix=self._closest(path))
        return found

    def _closest(self, path: tuple[str, ...]) -> str:
        """What to write instead of an unknown op."""
        if len(path) > 1 and path[0] in self.nodes:
            return f"write methods as ops: {path[-1]}({path[0]}, ...)"
        return _overloads(path) or _SPELL_OPS


def _dotted(node: ast.expr) -> tuple[str, ...]:
    """`prims.iota.default` -> its parts; empty for anything else."""
    match node:
        case ast.Name(name):
            return (name,)
        case ast.Attribute(value, name):
            left = _dotted(value)
            return (*left, name) if left else ()
    return ()


@cache
def _find(path: tuple[str, ...]) -> Any:
    """The op that a spelling means, or None."""
    if len(path) == 2 and ".".join(path) in FUNCTIONS:
        return FUNCTIONS[".".join(path)]
    if path[0] == "higher_order":
        return _higher_order(path[1:])
    packet, rest = _packet(path)
    overload = _unescape(rest[0]) if rest else "default"
    if packet is None or len(rest) > 1 or overload not in packet.overloads():
        return None
    found = getattr(packet, overload)
    # Outside the fake mode a text could do harm: aten::save is TorchScript's, and it writes files.
    return found if isinstance(found, OpOverload) and is_dispatched(found) else None


def _packet(path: tuple[str, ...]) -> tuple[OpOverloadPacket | None, tuple[str, ...]]:
    """The packet in a spelling and what follows it."""
    if path[0] in NAMESPACES:
        return _lookup(path[0], path[1:2]), path[2:]
    return _lookup("aten" if is_aten(path[0]) else "shardc", path[:1]), path[1:]


def _lookup(namespace: str, name: tuple[str, ...]) -> OpOverloadPacket | None:
    if namespace == "prims" and name and name[0].startswith("inductor_"):
        # They are defined on import, which takes a second that few texts need.
        import_module("torch._inductor.inductor_prims")
    found = getattr(getattr(torch.ops, namespace), name[0], None) if name else None
    return found if isinstance(found, OpOverloadPacket) else None


def _higher_order(name: tuple[str, ...]) -> HigherOrderOperator | None:
    found = getattr(torch.ops.higher_order, name[0], None) if len(name) == 1 else None
    return found if isinstance(found, HigherOrderOperator) else None


def _overloads(path: tuple[str, ...]) -> str | None:
    packet, rest = _packet(path)
    if packet is None:
        return None
    spellings = [(*path[: len(path) - len(rest)], name) for name in packet.overloads() if "out" not in name]
    found = [".".join(it) for it in spellings if _find(it)]
    return f"its overloads are {', '.join(found)}" if found else None


def _unescape(word: str) -> str:
    return word[:-1] if word.endswith("_") and keyword.iskeyword(word[:-1]) else word


@contextmanager
def _quiet() -> Iterator[None]:
    """The fake mode logs a traceback for an op that refuses its arguments; the Error here says it all."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, or where it is when this machine has no such device: a text can still be read."""
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError):
        return tensor
