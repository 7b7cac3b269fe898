"""Text in, text out; and graphs of real models through the text and back."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import passes.text
from passes import ops
from passes.errors import Error
from passes.parse import parse
from passes.regions import Region, regions
from passes.text import line_of, same, to_text

KEPT = {
    "hops": """\
def forward(blocks_0_w1: bf16[64, 512], x: bf16[16, 512]):
    a: bf16[512, 512] = all_gather(blocks_0_w1, 'node', 8, purpose='gather', params=['blocks.0.w1'], again=True)
    f: bf16[512, 512] = wait(a)
    y: bf16[16, 512] = mm(x, f)
    r: bf16[2, 512] = reduce_scatter(y, 'gpu+node', 8, purpose='reduce', params=['blocks.0.w1'])
    s: bf16[2, 512] = wait(r)
    return [y, s]
""",
    "an op of several results": """\
def forward(x: f32[64, 512]):
    t = topk(x, 2)
    u: f32[64, 2] = t[0]
    v: i64[64, 2] = t[1]
    return ([u], [v, None, (x,)], {'v': v})
""",
    "0-dim": """\
def forward(x: f32, y: i64):
    z: f32 = mul.Tensor(x, y)
    return z
""",
    "no tensors": """\
def forward(nothing: None, n: Sym(8), p: Sym(0.5)):
    m: Sym(16) = operator.mul(n, 2)
    return [nothing, m, p]
""",
    "symbolic dims": """\
s0 = Sym(16)
s27 = Sym(6)

def forward(n: Sym(s0), x: bf16[s0, 2*s0], y: f32[s27, (s0//2), s0**2 + 1], z: f32[s0, 2] @ [1, s0]):
    m: Sym(2*s0) = operator.mul(n, 2)
    v: bf16[2*s0**2] = view(x, [-1])
    w: bf16[s0, 2] = slice.Tensor(x, 1, 0, 2)
    k: Sym(s27) = sym_size.int(y, 0)
    o: f32[s27, 4] = ones([k, 4])
    c: Sym(s27 < 4) = operator.lt(k, 4)
    return [v, w, o, m, c]
""",
    "strides and devices of inputs": """\
device = 'cuda:0'

def forward(w: bf16[8, 4] @ [1, 8], x: bf16[4, 8], i: i64 @ 'cpu', e: f32[4, 4] @ [0, 1]):
    y: bf16[4, 4] = mm(x, w)
    z: bf16[4, 4] = add.Tensor(y, i)
    return [z]
""",
    "a dtype, a device, a layout, a memory format": """\
def forward(x: b8[4, 2], y: f8e4m3[4], g: u8[2]):
    a: f64[4] = full([4], 1, dtype=f64, layout=strided, device=device('cpu'), pin_memory=False)
    b: bf16[4, 2] = prims.convert_element_type(x, bf16)
    c: bf16[4, 2] = clone(b, memory_format=contiguous_format)
    d: c64[4] = _to_copy(y, dtype=c64)
    return [a, c, d, g]
""",
    "numbers": """\
def forward(x: f32[4]):
    a: f32[4] = sub.Tensor(x, -inf)
    b: f32[4] = clamp(x, nan, inf)
    c: f32[4] = mul.Tensor(x, -1e-05)
    d: c64[4] = mul.Tensor(x, complex(1.0, -2.0))
    e: f32[4] = add.Tensor(x, x, alpha=2)
    return [a, b, c, d, e]
""",
    "Python keywords in an op": """\
def forward(x: f32[4]):
    a: f32[4] = random.from_(x, 1, 5)
    b: f32[4] = uniform(x, from_=0.5)
    return [a, b]
""",
    "names that aten and shardc share": """\
def forward(x: f32[5, 2]):
    a: f32[8, 2] = shardc.expand(x, 5, [2, 2])
    b: f32[3, 5, 2] = expand(x, [3, 5, 2])
    c: f32[5, 2] = compact(a, 5, [2, 2])
    return [b, c]
""",
    "other namespaces": """\
def forward(x: i64[4]):
    a: i64[8] = prims.iota(8, start=0, step=1, dtype=i64, device=device('cpu'), requires_grad=False)
    s: i64[2] = prims.inductor_seeds(2, device('cpu'))
    t: i64 = prims.inductor_lookup_seed(s, 1)
    r: f32[4, 2] = prims.inductor_random([4, 2], t, 'rand')
    b: i64[32] = _c10d_functional.all_gather_into_tensor(a, 4, '0')
    w: i64[32] = _c10d_functional.wait_tensor(b)
    return [r, w]
""",
    "constants": """\
_tensor_constant0: i64[2, 2] = tensor([[1, 2], [3, -4]])
_tensor_constant1: f32 = tensor(inf)
empty: bf16[0, 3] = tensor([])
turned: b8[2, 1] @ [1, 2] = tensor([[True], [False]])

def forward(x: i64[2, 2]):
    _tensor_constant0: i64[2, 2] = _tensor_constant0
    y: i64[2, 2] = add.Tensor(x, _tensor_constant0)
    c: f32 = _tensor_constant1
    d: bf16[0, 3] = empty
    e: b8[2, 1] = turned
    again: i64[2, 2] = _tensor_constant0
    return [y, c, d, e, again]
""",
    "bodies of higher-order ops": """\
s0 = Sym(4)
_tensor_constant0: f32[2] = tensor([1.0, 2.0])

def inner(x: f32[s0, 2]):
    k: f32[2] = _tensor_constant0
    y: f32[s0, 2] = mul.Tensor(x, k)
    return (y,)

def yes(p: b8, x: f32[s0, 2]):
    inner = inner
    c = higher_order.cond(p, inner, inner, (x,))
    y: f32[s0, 2] = c[0]
    return (y,)

def no(p: b8, x: f32[s0, 2]):
    y: f32[s0, 2] = sin(x)
    return (y,)

def forward(p: b8, x: f32[s0, 2]):
    yes = yes
    no = no
    c = higher_order.cond(p, yes, no, (p, x))
    y: f32[s0, 2] = c[0]
    return [y]
""",
    "an op as an argument": """\
def forward(x: f32[4]):
    y = higher_order.run_and_save_rng_state(aten.rand.default, [4], device=device('cpu'))
    return [x]
""",
    "modules": """\
def forward(x: f32[4], w: f32[2]):
    y: f32[4] = relu(x)
    'blocks.0.mlp'
    t = topk(y, 2)
    u: f32[2] = t[0]
    ''
    z: f32[2] = mul.Tensor(u, w)
    None
    n: f32[2] = neg(z)
    'head'
    m: f32[2] = neg(n)
    return [m]
""",
    "regions": """\
one: f32[2] = tensor([1.0, 1.0])

def inner(x: f32[4]):
    y: f32[4] = relu(x)
    return (y,)

def region_1(x0: b8, x1: f32[4]):
    inner = inner
    c = higher_order.cond(x0, inner, inner, (x1,))
    y: f32[4] = c[0]
    return (y, x0)

def region_0(x0: f32[4]):
    a: f32[4] = neg(x0)
    return (a,)

def forward(p: b8, x: f32[4]):
    one: f32[2] = one
    'layers.0'
    region_1 = region_1(p, x)
    y: f32[4] = region_1[0]
    q: b8 = region_1[1]
    r = region_0(y)
    z: f32[4] = r[0]
    'layers.1'
    s = region_0(z)
    v: f32[4] = s[0]
    return ([v, q], [one], {'layers.0.w': z})
""",
    "arguments that hops leave out": """\
def forward(w: f32[4, 2]):
    a: f32[8, 2] = all_gather(w, 'gpu', 2, params=['w'])
    b: f32[8, 2] = wait(a)
    return [b]
""",
    "long headers": """\
def forward(
    a_parameter_with_a_long_name_0: f32[4],
    a_parameter_with_a_long_name_1: f32[4],
    a_parameter_with_a_long_name_2: f32[4],
):
    return [a_parameter_with_a_long_name_0]
""",
    "names that are words or ops elsewhere": """\
def forward(mm: f32[4, 4], device_1: f32[4, 4], Sym: f32[4, 4], f32_: f32[4, 4]):
    aten: f32[4, 4] = mm(mm, device_1)
    tensor: f32[4, 4] = mm(Sym, f32_)
    return [aten, tensor]
""",
}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_printed_text_reads_back_as_it_is(text: str) -> None:
    graph = parse(text)
    graph.lint()
    assert to_text(graph) == text
    assert same(graph, parse(text))


def test_example_of_the_module_reads_back_as_it_is() -> None:
    _, example, _ = (passes.text.__doc__ or "").replace("Before the `def`", "    device").split("    device", 2)
    text = textwrap.dedent("    device" + example).strip() + "\n"
    assert to_text(parse(text)) == text


def test_flex_attention_keeps_its_bodies() -> None:
    text = """\
def score(s: f32, b: i32, h: i32, q: i32, k: i32):
    d: i32 = sub.Tensor(q, k)
    y: f32 = add.Tensor(s, d)
    return y

def mask(b: i32, h: i32, q: i32, k: i32):
    y: b8 = ge.Tensor(q, k)
    return y

def forward(q: f32[2, 1, 128, 16], k: f32[2, 1, 128, 16], n: i32[1, 1, 1], i: i32[1, 1, 1, 1]):
    score = score
    mask = mask
    blocks = higher_order.flex_attention(q, k, k, score, BLOCKS, 0.25, {'BACKEND': 'AUTO'}, (), ())
    out: f32[2, 1, 128, 16] = blocks[0]
    return [out]
"""
    text = text.replace("BLOCKS", "(128, 128, n, i, None, None, n, i, None, None, 128, 128, mask)")
    assert to_text(parse(text)) == text


def test_types_are_recomputed_never_believed() -> None:
    wrong = "def forward(x: f32[4]):\n    y: bf16[1000] = relu(x)\n    z = neg(y)\n    return z"
    right = "def forward(x: f32[4]):\n    y: f32[4] = relu(x)\n    z: f32[4] = neg(y)\n    return z\n"
    assert to_text(parse(wrong)) == right


def test_text_may_be_indented_and_have_comments() -> None:
    text = """
        def step(x: f32[4]):  # an input
            y = relu(
                x,
            )

            return y
    """
    assert to_text(parse(text), "step") == "def step(x: f32[4]):\n    y: f32[4] = relu(x)\n    return y\n"


def test_parsed_nodes_carry_val_alone() -> None:
    graph = parse(KEPT["bodies of higher-order ops"])
    assert {key for node in graph.nodes for key in node.meta} == {"val"}


def test_modules_and_regions_are_parsed() -> None:
    graph = parse(KEPT["modules"])
    modules = {node.name: node.meta.get("module") for node in graph.nodes}
    assert [modules[name] for name in "xytuznm"] == [None, None, "blocks.0.mlp", "blocks.0.mlp", "", None, "head"]
    graph = parse(KEPT["regions"])
    first, second = [node.target for node in graph.nodes if node.name in "rs"]
    assert isinstance(first, Region)
    assert first is second
    assert (first.name, first.modules) == ("region_0", ["layers.0", "layers.1"])


def test_regions_have_the_key_that_they_were_made_with() -> None:
    text = "def forward(x: f32[4]):\n    'layers.0'\n    y = neg(x)\n    'layers.1'\n    z = neg(y)\n    return [z]"
    made: dict[str, Region] = {}
    again = parse(to_text(regions(parse(text), made)))
    assert {node.target.key for node in again.nodes if isinstance(node.target, Region)} == set(made)


def test_hops_may_leave_arguments_out() -> None:
    (start,) = ops.hops(parse(KEPT["arguments that hops leave out"]), "gather")
    assert (ops.hop(start).purpose, ops.hop(start).again) == ("gather", False)


def test_the_line_of_a_node_is_the_one_in_its_graph() -> None:
    for text in KEPT.values():
        graph = parse(text)
        for node in graph.nodes:
            assert line_of(node) in text


def test_parsed_graph_runs() -> None:
    graph = parse(KEPT["bodies of higher-order ops"])
    x = torch.randn(3, 2)
    owner: Any = graph.owning_module
    run = fx.GraphModule(owner, graph)
    assert torch.equal(run(torch.tensor(False), x)[0], x.sin())
    assert torch.equal(run(torch.tensor(True), x)[0], x * torch.tensor([1.0, 2.0]))


def test_strides_are_part_of_the_graph() -> None:
    graphs = [parse(f"def forward(x: f32[4, 8]{at}):\n    return x") for at in ("", " @ [8, 1]", " @ [1, 4]")]
    assert [node.meta["val"].stride() for g in graphs for node in g.nodes if node.op == "placeholder"] == [
        (8, 1),
        (8, 1),
        (1, 4),
    ]
    assert same(graphs[0], graphs[1])
    assert not same(graphs[0], graphs[2])


def test_getitem_without_a_val_prints_its_type() -> None:
    graph = parse(KEPT["an op of several results"])
    for node in graph.nodes:
        if node.name == "u":
            del node.meta["val"]
    assert to_text(graph) == KEPT["an op of several results"]


@pytest.mark.parametrize("name", ["f32", "inf", "class", "lambda", "sum", "strided", "None"])
def test_names_that_the_text_needs_get_an_underscore(name: str) -> None:
    graph = parse("def forward(x: f32[4]):\n    y = relu(x)\n    return [y]")
    next(iter(graph.nodes)).name = name
    text = f"def forward({name}_: f32[4]):\n    y: f32[4] = relu({name}_)\n    return [y]\n"
    assert to_text(graph) == text
    assert to_text(parse(text)) == text


def test_renaming_avoids_names_in_use() -> None:
    graph = parse("def forward(x: f32[4], class_: f32[4]):\n    return [x, class_]")
    next(iter(graph.nodes)).name = "class"
    text = "def forward(class__: f32[4], class_: f32[4]):\n    return [class__, class_]\n"
    assert to_text(graph) == text
    assert to_text(parse(text)) == text


def test_large_constants_print_but_do_not_read_back() -> None:
    graph = make_fx(lambda x: x + torch.arange(100).reshape(100), tracing_mode="fake")(torch.ones(100)).graph
    assert "return add" in to_text(graph)
    owner: Any = nn.Module()
    owner.table = torch.zeros(65)
    graph = fx.Graph(owner)
    graph.output(graph.create_node("get_attr", "table"))
    assert to_text(graph) == "table: f32[65] = tensor(...)\n\ndef forward():\n    table = table\n    return table\n"


def test_values_with_no_text_form_still_print() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = object()
    graph.output((node, torch.preserve_format, range(2)))
    text = "def forward(x: opaque('object')):\n    return (x, preserve_format, opaque('range(0, 2)'))\n"
    assert to_text(graph) == text


INPUTS = "def forward(x: f32[4, 8], y: f32[8, 4]):\n    "
REFUSED = {
    "no def": (
        "device = 'cuda:0'",
        "the text has no `def`\n  fix: a text ends with `def forward(x: f32[4]): ...`",
    ),
    "two graphs": (
        "def a(x: f32[2]):\n    return x\ndef b(x: f32[2]):\n    return x",
        "`a` is not used by `b`\n  fix: one text is one graph: parse them one by one",
    ),
    "not Python": (
        "def forward(x: f32[2]):\n    y = = 3",
        "not Python: invalid syntax\n  at: line 2: y = = 3\n  fix: write lines of the form `name: type = op(args)`",
    ),
    "import": (
        "import os",
        (
            "`import os` is not in the text form\n  at: line 1: import os\n"
            "  fix: write lines of the form `name: type = op(args)`"
        ),
    ),
    "import inside": (
        INPUTS + "import os\n    return x",
        (
            "`import os` is not in the text form\n  at: line 2: import os\n"
            "  fix: write lines of the form `name: type = op(args)`"
        ),
    ),
    "unknown op": (
        INPUTS + "z = foo(x)\n    return z",
        (
            "unknown op `foo`\n  at: line 2: z = foo(x)\n"
            "  fix: ops are spelled mm, add.Tensor, prims.iota, higher_order.cond, operator.mul"
        ),
    ),
    "unknown overload": (
        INPUTS + "z = mul(x, y)\n    return z",
        "unknown op `mul`\n  at: line 2: z = mul(x, y)\n  fix: its overloads are mul.Tensor, mul.Scalar",
    ),
    "ops of TorchScript": (
        INPUTS + "z = aten.save(x, 'file')\n    return z",
        (
            "unknown op `aten.save`\n  at: line 2: z = aten.save(x, 'file')\n"
            "  fix: ops are spelled mm, add.Tensor, prims.iota, higher_order.cond, operator.mul"
        ),
    ),
    "Python attributes": (
        INPUTS + "z = mm.__class__(x)\n    return z",
        "unknown op `mm.__class__`\n  at: line 2: z = mm.__class__(x)\n  fix: its overloads are mm.default, mm.dtype",
    ),
    "calls that Python would make": (
        INPUTS + "z = __import__('os').system('ls')\n    return z",
        (
            "`__import__('os').system` is not in the text form\n  at: line 2: z = __import__('os').system('ls')\n"
            "  fix: ops are spelled mm, add.Tensor, prims.iota, higher_order.cond, operator.mul"
        ),
    ),
    "unknown name": (
        INPUTS + "z = mm(x, w)\n    return z",
        "`w` is not defined\n  at: line 2: z = mm(x, w)\n  fix: define it on an earlier line",
    ),
    "two values of one name": (
        INPUTS + "x = relu(x)\n    return x",
        "`x` is assigned twice\n  at: line 2: x = relu(x)\n  fix: give every value its own name",
    ),
    "a second name": (
        INPUTS + "z = x\n    return z",
        (
            "`x` is no constant and no body\n  at: line 2: z = x\n"
            "  fix: a constant or body stands before the `def`; a value has one name only"
        ),
    ),
    "missing annotation": (
        "def forward(x):\n    return x",
        "argument `x` has no type\n  at: line 1: def forward(x):\n  fix: write `x: f32[4, 8]`",
    ),
    "default argument": (
        "def forward(x: f32[2] = 3):\n    return x",
        (
            "`def forward(x: f32[2]=3):` is not in the text form\n  at: line 1: def forward(x: f32[2] = 3):\n"
            "  fix: write `def forward(x: f32[4], ...):` with plain arguments"
        ),
    ),
    "unknown dtype": (
        "def forward(x: q7[2]):\n    return x",
        (
            "`q7[2]` is not in the text form\n  at: line 1: def forward(x: q7[2]):\n"
            "  fix: a type is a dtype and dims, f32[4, 8]; dtypes: f64, f32, f16, bf16, f8e4m3, f8e5m2, f8e4m3fnuz, "
            "f8e5m2fnuz, f8e8m0, f4e2m1x2, i64, i32, i16, i8, u64, u32, u16, u8, b8, c128, c64, c32"
        ),
    ),
    "undeclared symbol": (
        "def forward(x: f32[s0]):\n    return x",
        (
            "symbol `s0` is not declared\n  at: line 1: def forward(x: f32[s0]):\n"
            "  fix: say its hint before the `def`: s0 = Sym(16)"
        ),
    ),
    "hint of one": (
        "s0 = Sym(1)\ndef forward(x: f32[s0]):\n    return x",
        "`s0` has hint 1; a symbolic size is 2 or more\n  at: line 1: s0 = Sym(1)",
    ),
    "huge power": (
        "def forward(x: f32[9**9**9]):\n    return x",
        (
            "`9 ** 9 ** 9` is not in the text form\n  at: line 1: def forward(x: f32[9**9**9]):\n"
            "  fix: a size is a number, a symbol, or +, -, *, //, %, **, Max, Min of sizes"
        ),
    ),
    "strides of another kind": (
        "def forward(x: f32[4] @ 3):\n    return x",
        (
            "`3` is not in the text form\n  at: line 1: def forward(x: f32[4] @ 3):\n"
            "  fix: write f32[4, 8] @ [1, 4] for strides, f32[4, 8] @ 'cpu' for a device"
        ),
    ),
    "method": (
        INPUTS + "z = x.view([32])\n    return z",
        "unknown op `x.view`\n  at: line 2: z = x.view([32])\n  fix: write methods as ops: view(x, ...)",
    ),
    "op in an op": (
        INPUTS + "z = relu(relu(x))\n    return z",
        (
            "`relu(x)` is not in the text form\n  at: line 2: z = relu(relu(x))\n"
            "  fix: an argument is a literal, a name or a list of them; give every op a line of its own"
        ),
    ),
    "comprehension": (
        INPUTS + "z = stack([a for a in x])\n    return z",
        (
            "`[a for a in x]` is not in the text form\n  at: line 2: z = stack([a for a in x])\n"
            "  fix: an argument is a literal, a name or a list of them; give every op a line of its own"
        ),
    ),
    "starred": (
        INPUTS + "z = relu(**x)\n    return z",
        (
            "`relu(**x)` is not in the text form\n  at: line 2: z = relu(**x)\n"
            "  fix: write lines of the form `name: type = op(args)`"
        ),
    ),
    "arithmetic": (
        INPUTS + "z = mul.Tensor(x, 9**9)\n    return z",
        (
            "`9 ** 9` is not in the text form\n  at: line 2: z = mul.Tensor(x, 9**9)\n"
            "  fix: an argument is a literal, a name or a list of them; give every op a line of its own"
        ),
    ),
    "a module of another kind": (
        INPUTS + "3\n    return x",
        ("`3` is not in the text form\n  at: line 2: 3\n  fix: write lines of the form `name: type = op(args)`"),
    ),
    "no return": (
        INPUTS + "z = relu(x)",
        "`z = relu(x)` is not in the text form\n  at: line 2: z = relu(x)\n  fix: `forward` ends with `return [...]`",
    ),
    "shapes that do not fit": (
        INPUTS + "z = reduce_scatter(x, 'gpu', 3, params=[])\n    return z",
        (
            "`z` cannot be computed: reduce_scatter: 4 rows do not divide by 3\n"
            "  at: line 2: z = reduce_scatter(x, 'gpu', 3, params=[])"
        ),
    ),
    "constant without its elements": (
        "w: f32[3] = tensor(...)\ndef forward():\n    w = w\n    return w",
        (
            "the elements of `w` are not in the text\n  at: line 1: w: f32[3] = tensor(...)\n"
            "  fix: make `w` an argument of the `def`, or write its elements"
        ),
    ),
    "constant of another shape": (
        "w: f32[3] = tensor([1, 2])\ndef forward():\n    w = w\n    return w",
        "`w` cannot be made: shape '[3]' is invalid for input of size 2\n  at: line 1: w: f32[3] = tensor([1, 2])",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_in_the_text_form_is_an_error(text: str, message: str) -> None:
    with pytest.raises(Error) as error:
        parse(text)
    assert str(error.value) == message


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, rows, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, rows, dim)
        x = x + self.drop(self.out(seen))
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 32, dim: int = 16):
        super().__init__()
        self.embed, self.block = nn.Embedding(vocabulary, dim), Block(dim, 2)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embed(ids)))
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def joint(dtype: torch.dtype) -> fx.GraphModule:
    return _export(Transformer().to(dtype), [torch.randint(0, 32, (4, 8)) for _ in range(2)])


def dynamic_joint() -> fx.GraphModule:
    """With a symbolic batch size: Dynamo makes the symbols, and its fake mode must be the export's."""
    inputs = [torch.randint(0, 32, (4, 8)) for _ in range(2)]
    for it in inputs:
        torch._dynamo.mark_dynamic(it, 0)
    captured = _dynamo_graph_capture_for_export(Transformer())(*inputs)
    fake = [node.meta["val"] for node in captured.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(torch._guards.TracingContext(captured.meta["fake_mode"])):
        return _export(captured, fake)


def _export(model: nn.Module, inputs: list[torch.Tensor]) -> fx.GraphModule:
    with contextlib.ExitStack() as stack:
        table = select_decomp_table()
        exported = aot_export_joint_with_descriptors(stack, model, tuple(inputs), {}, decompositions=table)
        return exported.graph_module


def check(graph: fx.Graph) -> None:
    text = to_text(graph)
    read = parse(text)
    read.lint()
    assert to_text(read) == text
    assert same(graph, read)
    assert [node.name for node in graph.nodes] == [node.name for node in read.nodes]
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        node.target for node in read.nodes if node.op == "call_function"
    ]


@pytest.mark.parametrize("make", [lambda: joint(torch.float32), lambda: joint(torch.bfloat16)], ids=["f32", "bf16"])
def test_joint_graph_of_a_transformer(make: Callable[[], fx.GraphModule]) -> None:
    check(make().graph)


def test_joint_graph_with_a_dynamic_batch() -> None:
    graph = dynamic_joint().graph
    assert " = Sym(4)\n" in to_text(graph)
    check(graph)


def test_forward_and_backward_of_the_partitioner() -> None:
    for half in min_cut_rematerialization_partition(joint(torch.float32), [], num_fwd_outputs=1):
        check(half.graph)


def test_constants_and_bodies_from_tracing() -> None:
    def step(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(p, lambda x: x.sin() + torch.tensor([1.0, 2.0]), lambda x: x.cos(), (x,))
        return y * torch.tensor([1, 2])

    graph = make_fx(step, tracing_mode="fake")(torch.tensor(True), torch.randn(2)).graph
    assert to_text(graph).startswith("_tensor_constant0: f32[2] = tensor([1.0, 2.0])\n")
    text = to_text(graph)
    assert to_text(parse(text)) == text


def test_large_graphs_take_linear_time() -> None:
    lines = ["def forward(v0: f32[8, 8]):"]
    lines += [f"    v{i}: f32[8, 8] = add.Tensor(v{i - 1}, v{i // 2})" for i in range(1, 3000)]
    text = "\n".join([*lines, "    return [v2999]", ""])
    assert to_text(parse(text)) == text
