from __future__ import annotations

import json
from dataclasses import replace
from textwrap import dedent

import pytest
import torch

from passes.errors import Error
from shardc.plan import PARO, Plan, Row
from shardc.rest import state_bytes
from shardc.topology import Topology

TWO = Topology(node=2, gpu=4)
ONE = Topology(gpu=8)
FRONTIER = Topology(node=48, gpu=4, gcd=2)
F32, BF16 = torch.float32, torch.bfloat16


def message(call, *args, **kwargs) -> str:
    with pytest.raises(Error) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def names(plan: Plan) -> list[str]:
    return [plan.topology.rung_name(rung) for rung in plan.default]


def test_the_default_is_everything_replicated():
    assert Plan(TWO).default == Row(0, 0, 0, 0)


def test_after_forward_is_params_unless_given():
    assert Plan(TWO, params="gpu", optim="all").after_forward == 1
    assert Plan(TWO, params="gpu", after_forward="replicated", optim="all").after_forward == 0


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"params": "all", "optim": "gpu"},
            (
                "optim must be at or above params on the ladder, but optim is 'gpu' and params is 'all'\n"
                "  fix: optim='all', or params='gpu'"
            ),
        ),
        (
            {"grads": "gpu"},
            (
                "optim must be at or above grads on the ladder, but optim is 'replicated' and grads is 'gpu'\n"
                "  fix: optim='gpu', or grads='replicated'"
            ),
        ),
        (
            {"params": "gpu", "after_forward": "all", "optim": "all"},
            (
                "after_forward must be at or below params on the ladder, "
                "but after_forward is 'all' and params is 'gpu'\n"
                "  fix: after_forward='gpu', or params='all'"
            ),
        ),
        (
            {"params": "node", "optim": "all"},
            (
                "params: a rung starts at the innermost axis and leaves none out, but 'node' lacks 'gpu'\n"
                "  fix: did you mean 'gpu+node'?"
            ),
        ),
        (
            {"optim": "gpux"},
            "optim: unknown axis 'gpux'; the axes, innermost first, are 'gpu', 'node'\n  fix: did you mean 'gpu'?",
        ),
    ],
)
def test_an_illegal_row_names_the_rule_and_the_legal_spelling(row, text):
    assert message(Plan, TWO, **row) == text


def test_params_and_grads_need_not_be_ordered():
    for params, grads in (("gpu", "replicated"), ("replicated", "gpu"), ("all", "gpu"), ("gpu", "all")):
        Plan(TWO, params=params, grads=grads, optim="all")


@pytest.mark.parametrize(("topology", "count"), [(ONE, 7), (TWO, 25), (FRONTIER, 65)])
def test_legal_lists_every_legal_row_once(topology, count):
    plans = Plan.legal(topology)
    assert len(plans) == len(set(plans)) == count
    rungs = range(len(topology.axes) + 1)
    rows = {Row(p, a, g, o) for p in rungs for a in rungs for g in rungs for o in rungs if max(p, g) <= o and a <= p}
    assert {plan.default for plan in plans} == rows


@pytest.mark.parametrize(
    ("plan", "row"),
    [
        (Plan.ddp(TWO), "replicated replicated replicated replicated"),
        (Plan.zero1(TWO), "replicated replicated replicated all"),
        (Plan.zero2(TWO), "replicated replicated all all"),
        (Plan.zero3(TWO), "all all all all"),
        (Plan.zero3(TWO, reshard=False), "all replicated all all"),
        (Plan.hsdp(TWO), "gpu gpu gpu gpu"),
        (Plan.mics(TWO), "gpu gpu gpu gpu"),
        (Plan.hpz(TWO), "all gpu all all"),
        (Plan.hpz(FRONTIER), "all gcd+gpu all all"),
        (Plan.hsdp(FRONTIER), "gcd+gpu gcd+gpu gcd+gpu gcd+gpu"),
        (Plan.zero3(ONE), "all all all all"),
        (Plan.paro(TWO, "NIG"), "replicated replicated gpu all"),
        (Plan.paro(TWO, "ING"), "gpu gpu replicated all"),
        (Plan.paro(ONE, "NGG"), "replicated replicated all all"),
        (Plan.amsp(TWO, 1, 1, 4), "replicated replicated replicated gpu"),
        (Plan.amsp(TWO, 4, 8, 8), "gpu gpu all all"),
    ],
)
def test_presets_are_rows(plan, row):
    assert names(plan) == row.split()


def test_presets_pass_options_on():
    options = {
        "param_dtype": BF16,
        "reduce_dtype": F32,
        "reduce": "sum",
        "overrides": {"*norm*": {"params": "replicated"}},
    }
    for preset in (Plan.ddp, Plan.zero1, Plan.zero2, Plan.zero3, Plan.hsdp, Plan.mics, Plan.hpz):
        plan = preset(TWO, **options)
        assert (plan.param_dtype, plan.reduce_dtype, plan.reduce, len(plan.overrides)) == (BF16, F32, "sum", 1)
    assert Plan.paro(TWO, "IIG", **options).param_dtype == Plan.amsp(TWO, 1, 1, 4, **options).param_dtype == BF16


@pytest.mark.parametrize("preset", [Plan.hsdp, Plan.mics, Plan.hpz])
def test_a_preset_that_needs_two_axes_says_what_to_do(preset):
    assert message(preset, ONE) == (
        f"{preset.__name__} needs two axes, but Topology(gpu=8) has one\n"
        "  fix: split it by node: Topology(node=..., gpu=...)"
    )


def test_paro_has_exactly_its_fourteen_strategies():
    plans = {Plan.paro(TWO, letters) for letters in PARO}
    assert len(plans) == 14
    assert plans == {plan for plan in Plan.legal(TWO) if plan.after_forward == plan.params}


@pytest.mark.parametrize("letters", ["GNN", "IIN", "NN", "xyz", "nng"])
def test_other_letters_list_the_legal_ones(letters):
    assert message(Plan.paro, TWO, letters) == f"{letters!r} is not a PaRO strategy\n  fix: one of {', '.join(PARO)}"


def test_paro_inside_a_node_needs_two_axes():
    assert "paro 'IIG' needs two axes" in message(Plan.paro, ONE, "IIG")


@pytest.mark.parametrize(
    ("topology", "factors", "split", "row"),
    [
        (Topology(node=128, gpu=8), (1, 1, 8), Topology(node=128, gpu=8), Row(0, 0, 0, 1)),
        (Topology(node=128, gpu=8), (4, 4, 8), Topology(node=128, gpu1=2, gpu0=4), Row(1, 1, 1, 2)),
        (Topology(node=128, gpu=8), (8, 8, 32), Topology(node1=32, node0=4, gpu=8), Row(1, 1, 1, 2)),
        (ONE, (2, 4, 8), Topology(gpu2=2, gpu1=2, gpu0=2), Row(1, 1, 2, 3)),
        (Topology(node=2, gpu=1), (1, 1, 2), Topology(node=2, gpu=1), Row(0, 0, 0, 2)),
    ],
)
def test_amsp_splits_an_axis_where_a_factor_is_inside_it(topology, factors, split, row):
    plan = Plan.amsp(topology, *factors)
    assert (plan.topology, plan.default) == (split, row)
    assert tuple(plan.topology.shared_by(rung) for rung in (row.params, row.grads, row.optim)) == factors


@pytest.mark.parametrize(
    ("topology", "factors", "wrong"),
    [
        (TWO, (3, 4, 8), "a factor of 3 cannot be reached on Topology(node=2, gpu=4)"),
        (TWO, (1, 1, 16), "a factor of 16 cannot be reached"),
        (TWO, (1, 0, 4), "a factor of 0 cannot be reached"),
        (Topology(gpu=6), (2, 3, 6), "factors 2 and 3 do not nest: both cut axis 'gpu'"),
        (Topology(gpu0=2, gpu=8), (2, 2, 2), "an axis is named twice"),
        (TWO, (8, 4, 4), "optim must be at or above params"),
    ],
)
def test_amsp_refuses_what_no_rung_can_be(topology, factors, wrong):
    assert wrong in message(Plan.amsp, topology, *factors)


def test_amsp_lists_the_factors_that_can_be_reached():
    assert "fix: one of 1, 2, 4, 8" in message(Plan.amsp, TWO, 3, 4, 8)


def test_overrides_apply_by_name_and_the_later_one_wins():
    plan = Plan.zero3(TWO, overrides={"*norm*": {"params": "replicated"}, "final_norm.*": {"params": "gpu"}})
    assert plan.row("blocks.0.w") == Row(2, 2, 2, 2)
    assert plan.row("blocks.0.norm.weight") == Row(0, 0, 2, 2)
    assert plan.row("final_norm.weight") == Row(1, 0, 2, 2)


def test_patterns_respect_case():
    assert Plan.zero3(TWO, overrides={"*Norm*": {"params": "gpu"}}).row("norm").params == 2


def test_an_inherited_after_forward_is_clamped_to_params():
    plan = Plan.hpz(
        TWO, overrides={"a": {"params": "replicated"}, "b": {"params": "gpu", "after_forward": "replicated"}}
    )
    assert (plan.row("a"), plan.row("b"), plan.row("c")) == (Row(0, 0, 2, 2), Row(1, 0, 2, 2), Row(2, 1, 2, 2))


def test_an_illegal_override_is_refused_with_its_pattern():
    text = message(Plan.hsdp, TWO, overrides={"*norm*": {"params": "all"}})
    assert text == (
        "optim must be at or above params on the ladder, but optim is 'gpu' and params is 'all'\n"
        "  at: override '*norm*'\n  fix: optim='all', or params='gpu'"
    )
    text = message(Plan.zero3, TWO, overrides={"w": {"params": "gpu", "after_forward": "all"}})
    assert "after_forward must be at or below params" in text


def test_overrides_that_are_illegal_together_name_the_parameter():
    plan = Plan.zero3(TWO, overrides={"*": {"params": "gpu", "grads": "gpu", "optim": "gpu"}, "w*": {"grads": "all"}})
    assert plan.row("v") == Row(1, 1, 1, 1)
    assert "at: override 'w*' for parameter 'w1'" in message(plan.row, "w1")


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        ({"w": {"param": "gpu"}}, "override 'w' sets 'param'\n  fix: did you mean 'params'?"),
        ({"w": {"zzz": "gpu"}}, "override 'w' sets 'zzz'\n  fix: one of params, after_forward, grads, optim"),
        ({"w": {"params": "node"}}, "override 'w', params: a rung starts at the innermost axis"),
        ({"w": "gpu"}, "overrides are {'w': 'gpu'}"),
        (["w"], "overrides are ['w']"),
        ({3: {"params": "gpu"}}, "override 3 is no pattern"),
    ],
)
def test_malformed_overrides_are_refused(overrides, wrong):
    assert wrong in message(Plan, TWO, optim="all", overrides=overrides)


def test_a_frozen_parameter_is_stored_once_on_its_params_rung():
    assert Plan.paro(TWO, "NIG").row("w", trainable=False) == Row(0, 0, 0, 0)
    assert Plan.paro(TWO, "IIG").row("w", trainable=False) == Row(1, 1, 1, 1)
    assert Plan.hpz(TWO).row("w", trainable=False) == Row(2, 1, 2, 2)


@pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bfloat16"])
def test_dtypes_are_floating(key, dtype):
    assert message(Plan, TWO, **{key: dtype}).startswith(f"{key} is {dtype!r}\n  fix: a floating-point dtype")


def test_reduce_is_mean_or_sum():
    assert "reduce is 'max'\n  fix: 'mean' or 'sum'" in message(Plan, TWO, reduce="max")


def test_equal_plans_are_one_key_however_they_are_spelled():
    a = Plan(TWO, params="gpu", optim="all", overrides={"w": {"optim": "all", "params": "replicated"}})
    b = Plan(TWO, params=1, after_forward=("gpu",), optim="node+gpu", overrides={"w": {"params": 0, "optim": 2}})
    assert a == b and hash(a) == hash(b) and a != replace(b, reduce="sum")


def test_repr_is_the_call_that_makes_the_plan():
    plan = Plan.hpz(TWO, param_dtype=BF16, reduce="sum", overrides={"*norm*": {"params": "replicated"}})
    assert eval(repr(plan)) == plan
    assert "overrides={'*norm*': {'params': 'replicated'}}" in repr(plan)


def test_str_is_one_line_of_names():
    plan = Plan.hpz(TWO, param_dtype=BF16, reduce="sum", overrides={"*norm*": {"params": "replicated"}})
    assert str(plan) == (
        "params all, after_forward gpu, grads all, optim all on node=2 x gpu=4, "
        "param_dtype bfloat16, gradients summed, 1 override"
    )


def test_layouts_carry_the_rows_and_leave_what_cannot_be_split_whole():
    layouts = Plan.hpz(TWO).layouts(
        {"w": ((10, 4), True), "frozen": ((10,), False), "scale": ((), True), "empty": ((3, 0), True)}
    )
    rungs = {name: (x.params, x.after_forward, x.grads, x.optim) for name, x in layouts.items()}
    assert rungs == {"w": (2, 1, 2, 2), "frozen": (2, 1, 2, 2), "scale": (0, 0, 0, 0), "empty": (0, 0, 0, 0)}
    assert layouts["w"].axes == (("gpu", 4), ("node", 2)) and layouts["w"].shape == (10, 4)
    assert layouts["w"].trainable and not layouts["frozen"].trainable


def test_a_pattern_without_a_parameter_lists_the_closest_names():
    plan = Plan.zero3(TWO, overrides={"*nrom*": {"params": "gpu"}})
    text = message(plan.layouts, {"norm.weight": ((4,), True), "head": ((4,), True)})
    assert text == "override '*nrom*' matches no parameter\n  fix: the closest names are 'norm.weight'"
    assert "the model has no parameters" in message(plan.layouts, {})


NAMED = {"w": ((1024, 512), F32, True), "norm": ((5,), F32, True), "frozen": ((16, 4), F32, False)}


def test_state_bytes_of_zero3_are_all_on_the_optim_rung():
    w, norm, frozen = 1024 * 512 // 8, 1, 16 * 4 // 8
    assert state_bytes(Plan.zero3(TWO, param_dtype=BF16), NAMED) == {
        "master": 4 * (w + norm + frozen),
        "optimizer": 8 * (w + norm),
        "copies": 0,
        "accumulators": 0,
        "grads": 4 * (w + norm),
        "residuals": 0,
    }


def test_state_bytes_count_copies_and_accumulators_with_their_padding():
    """5 rows on 4 x 2 travel as 8 pieces of 1 row: 2 a rank on the rung gpu. The frozen one stays in its own dtype."""
    plan = Plan.paro(TWO, "IIG", param_dtype=BF16, reduce_dtype=F32)
    inside, own = 1024 * 512 // 4 + 2, 1024 * 512 // 8 + 1
    assert state_bytes(plan, NAMED, optimizer_states=1) == {
        "master": 4 * (own + 16 * 4 // 4),
        "optimizer": 4 * own,
        "copies": 2 * inside,
        "accumulators": 4 * inside,
        "grads": 4 * own,
        "residuals": 0,
    }


def test_accumulators_fall_back_from_reduce_to_param_to_master_dtype():
    one = {"w": ((8,), F32, True)}
    sizes = [
        state_bytes(Plan.zero1(TWO, param_dtype=param, reduce_dtype=reduce), one)["accumulators"]
        for param, reduce in ((None, None), (BF16, None), (BF16, torch.float64))
    ]
    assert sizes == [32, 16, 64]


def test_mixed_precision_adam_is_sixteen_bytes_a_parameter():
    """AMSP's memory, 2/s_p + 2/s_g + 12/s_os, without the .grad that torch's optimizers need besides."""
    one = {"w": ((1 << 20,), F32, True)}
    for plan in (Plan.paro(TWO, letters, param_dtype=BF16) for letters in ("NNI", "NIG", "IIG", "ING")):
        size = state_bytes(plan, one)
        p, g, o = (plan.topology.shared_by(rung) for rung in (plan.params, plan.grads, plan.optim))
        assert sum(size.values()) - size["grads"] == (2 / p + 2 / g + 12 / o) * (1 << 20)


def test_the_table_shows_rungs_ranks_and_bytes():
    plan = Plan.paro(TWO, "IIG", param_dtype=BF16, overrides={"*norm*": {"params": "replicated"}})
    big = {"w": ((8 << 20,), F32, True), "norm": ((8,), F32, True)}
    assert plan.table(big) == dedent("""\
        params gpu, after_forward gpu, grads gpu, optim all on node=2 x gpu=4, param_dtype bfloat16, 1 override

        state          rung             ranks a copy   MiB a rank  what
        params         gpu                         4         4.00  compute copies in bfloat16
        after_forward  gpu                         4         0.00  nothing more than params
        grads          gpu                         4         4.00  accumulators in bfloat16; .grad 4.00 on optim's rung
        optim          all                         8        12.00  master 4.00 + optimizer 8.00
        at rest                                             24.00  with .grad, without after_forward
        overrides (a later one wins)
          *norm*: params replicated""")


def test_the_table_says_where_a_state_is_none_of_its_own():
    lines = Plan.hpz(TWO).table({"w": ((8 << 20,), F32, True)}).splitlines()[3:6]
    assert [line.split(maxsplit=4)[3:] for line in lines] == [
        ["0.00", "same as optim"],
        ["8.00", "held from a forward to its backward"],
        ["0.00", "the accumulator is .grad; .grad 4.00 on optim's rung"],
    ]


PLANS = [
    *Plan.legal(TWO),
    Plan.amsp(Topology(node=4, gpu=8), 4, 4, 16, param_dtype=BF16),
    Plan.hpz(FRONTIER, reduce="sum", reduce_dtype=F32, overrides={"b*": {"params": "gcd"}, "a": {"optim": "all"}}),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_json_gives_an_equal_plan_back(plan):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(json.dumps(json.loads(plan.to_json()), sort_keys=True)) == plan


def test_json_names_rungs_and_dtypes():
    saved = json.loads(Plan.hpz(TWO, param_dtype=BF16).to_json())
    assert (saved["params"], saved["after_forward"], saved["param_dtype"]) == ("all", "gpu", "bfloat16")


def test_a_file_gives_an_equal_plan_back(tmp_path):
    PLANS[-1].save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLANS[-1]


GOOD = json.loads(Plan.hsdp(TWO).to_json())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "not JSON: Expecting value"),
        (Plan.hsdp(TWO).to_json()[:-20], "not JSON"),
        ("[]", "a JSON list where an object is expected"),
        ("{}", "key 'topology' is missing"),
        (json.dumps({**GOOD, "parms": "gpu"}), "unknown key 'parms'\n  fix: did you mean 'params'?"),
        (json.dumps({**GOOD, "params": "gpux"}), "params: unknown axis 'gpux'"),
        (json.dumps({**GOOD, "params": None}), "params: None is not a rung"),
        (json.dumps({**GOOD, "optim": "replicated"}), "optim must be at or above params"),
        (json.dumps({**GOOD, "topology": 3}), "a topology is saved as"),
        (json.dumps({**GOOD, "param_dtype": "bfloat17"}), "param_dtype is 'bfloat17'"),
        (json.dumps({**GOOD, "param_dtype": "int8"}), "param_dtype is torch.int8"),
        (json.dumps({**GOOD, "param_dtype": 16}), "param_dtype is 16"),
        (json.dumps({**GOOD, "reduce": ["mean"]}), "reduce is ['mean']"),
        (json.dumps({**GOOD, "overrides": 7}), "overrides are 7"),
    ],
)
def test_a_corrupt_file_is_one_error_with_its_path_and_what_is_wrong(tmp_path, text, wrong):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert message(Plan.load, path).startswith(f"{path} is no plan: {wrong}")


def test_a_binary_file_is_no_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert message(Plan.load, path).startswith(f"{path} is no plan: not UTF-8 text")
