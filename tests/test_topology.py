from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.errors import Error
from shardc.links import Device, Link
from shardc.times import collective_us
from shardc.topology import Topology

TWO = Topology(node=2, gpu=4)
FRONTIER = Topology(node=48, gpu=4, gcd=2)


@pytest.fixture
def job(monkeypatch):
    """Starts a fake process group of a given size; no LOCAL_WORLD_SIZE unless the test sets it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    yield lambda world: torch.distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def message(call, *args, **kwargs) -> str:
    with pytest.raises(Error) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_flat_links_that_were_measured_take_the_place_of_those_worked_out() -> None:
    shape = Topology(node=2, gpu=4).with_links(Device("d", 1.0, 1.0, 1.0), node=Link(1.0, 5.0), gpu=Link(9.0, 1.0))
    measured = shape.with_flat({"gpu+node": Link(2.0, 10.0)})
    assert Topology.from_dict(measured.to_dict()) == measured
    assert collective_us(shape, "all_reduce", "gpu+node", 8e6, 8) == 8e6 / (4 * 1e3) + 14 * 5.0
    assert collective_us(measured, "all_reduce", "gpu+node", 8e6, 8) == 8e6 / (2 * 1e3) + 14 * 10.0
    assert measured.split([2]).flat == (("gpu0+gpu1+node", Link(2.0, 10.0)),)
    with pytest.raises(Error, match="'node\\+gpu' are no neighbouring axes(.|\n)*gpu\\+node"):
        shape.with_flat({"node+gpu": Link(1.0, 1.0)})


def test_axes_are_outermost_first_and_inner_is_reversed():
    assert (FRONTIER.axes, FRONTIER.sizes, FRONTIER.world) == (("node", "gpu", "gcd"), (48, 4, 2), 384)
    assert FRONTIER.inner == (("gcd", 2), ("gpu", 4), ("node", 48))


def test_equal_topologies_are_one_key_and_the_order_of_axes_matters():
    assert len({TWO, Topology(node=2, gpu=4), Topology(gpu=4, node=2)}) == 2
    assert pickle.loads(pickle.dumps(TWO)) == TWO
    assert repr(TWO) == "Topology(node=2, gpu=4)"


def test_a_topology_cannot_be_changed():
    with pytest.raises(AttributeError):
        TWO.sizes = (1, 1)


def test_a_size_of_one_is_an_axis():
    assert Topology(node=1, gpu=1).world == 1


@pytest.mark.parametrize("name", ["all", "replicated", "full", "gpu+node", "2nd", ""])
def test_names_with_another_meaning_are_refused(name):
    assert f"{name!r} cannot name an axis" in message(Topology, **{name: 2})


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_sizes_are_positive_integers(size):
    assert f"axis 'gpu' has size {size!r}\n  fix: an integer of at least 1" == message(Topology, gpu=size)


def test_no_axis_is_refused():
    assert "at least one axis" in message(Topology)


def test_ranks_are_row_major_with_coordinates_inner_axis_first():
    assert [TWO.coordinate(rank) for rank in (0, 1, 4, 7)] == [(0, 0), (1, 0), (0, 1), (3, 1)]
    assert len({FRONTIER.coordinate(rank) for rank in range(384)}) == 384


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_has_no_coordinate(rank):
    assert f"rank {rank} is not one of the 8 ranks" in message(TWO.coordinate, rank)


@pytest.mark.parametrize(
    ("spec", "rung"),
    [("replicated", 0), ((), 0), ("gpu", 1), (("gpu",), 1), (1, 1), ("gpu+node", 2), ("node + gpu", 2), ("all", 2)]
    + [(("node", "gpu"), 2), (["gpu", "node"], 2)],
)
def test_rungs_are_spelled_in_several_ways(spec, rung):
    assert TWO.rung(spec) == rung


def test_rung_names_are_specs():
    names = [FRONTIER.rung_name(rung) for rung in range(4)]
    assert names == ["replicated", "gcd", "gcd+gpu", "all"]
    assert [FRONTIER.rung(name) for name in names] == [0, 1, 2, 3]
    assert Topology(gpu=8).rung_name(1) == "all"


def test_a_rung_that_leaves_out_an_inner_axis_names_the_rule_and_the_legal_spelling():
    assert message(TWO.rung, "node") == (
        "a rung starts at the innermost axis and leaves none out, but 'node' lacks 'gpu'\n"
        "  fix: did you mean 'gpu+node'?"
    )
    assert "'gcd+node' lacks 'gpu'\n  fix: did you mean 'gcd+gpu+node'?" in message(FRONTIER.rung, ("gcd", "node"))
    assert "'gpu' lacks 'gcd'\n  fix: did you mean 'gcd+gpu'?" in message(FRONTIER.rung, "gpu")


def test_an_unknown_axis_lists_the_known_ones_and_the_closest():
    assert message(TWO.rung, "gpus") == (
        "unknown axis 'gpus'; the axes, innermost first, are 'gpu', 'node'\n  fix: did you mean 'gpu'?"
    )
    assert "did you mean 'replicated'?" in message(TWO.rung, "replicate")
    assert "one of 'replicated', 'gpu', 'all'" in message(TWO.rung, "xyz")


@pytest.mark.parametrize("spec", [3, -1, True])
def test_a_count_outside_the_ladder_is_no_rung(spec):
    assert f"{spec!r} is not a rung of Topology(node=2, gpu=4)\n  fix: a number of inner axes, 0 to 2" == message(
        TWO.rung, spec
    )


@pytest.mark.parametrize("spec", [None, 1.5, (1, 2), {"gpu"}])
def test_other_types_are_no_rung(spec):
    assert "is not a rung" in message(TWO.rung, spec)


def test_an_axis_named_twice_is_no_rung():
    assert "names an axis twice" in message(TWO.rung, "gpu+gpu")


def test_shared_by_counts_the_ranks_of_one_copy():
    assert [FRONTIER.shared_by(rung) for rung in ("replicated", "gcd", "gcd+gpu", "all")] == [1, 2, 8, 384]


def test_group_size_takes_any_axes():
    assert [FRONTIER.group_size(axes) for axes in ("node", "gpu", "gcd+node", ("gpu", "node"))] == [48, 4, 96, 192]
    assert "unknown axis 'gpux'" in message(FRONTIER.group_size, "gpux")


def test_a_dict_keeps_the_order_of_axes():
    assert FRONTIER.to_dict() == {"axes": ["node", "gpu", "gcd"], "sizes": [48, 4, 2]}
    assert Topology.from_dict(FRONTIER.to_dict()) == FRONTIER


@pytest.mark.parametrize(
    ("saved", "wrong"),
    [
        ([], "a topology is saved as"),
        ({"axes": ["gpu"]}, "a topology is saved as"),
        ({"axes": ["gpu"], "sizes": [2, 2]}, "lists of one length"),
        ({"axes": "ab", "sizes": [2, 2]}, "lists of one length"),
        ({"axes": [1], "sizes": [2]}, "names of axes are strings"),
        ({"axes": ["gpu", "gpu"], "sizes": [2, 2]}, "an axis is named twice"),
        ({"axes": ["gpu"], "sizes": ["2"]}, "axis 'gpu' has size '2'"),
        ({"axes": [], "sizes": []}, "at least one axis"),
    ],
)
def test_a_dict_that_is_no_topology_says_why(saved, wrong):
    assert wrong in message(Topology.from_dict, saved)


SLURM = {"SLURM_NTASKS": "8"}


def test_a_topology_is_saved_with_its_links_and_loaded(tmp_path):
    topology = Topology.preset("dgx-h100", nodes=2)
    topology.save(tmp_path / "topology.json")
    assert Topology.load(tmp_path / "topology.json") == topology


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "is no topology: it is no JSON"),
        ("[]", "is no topology: a topology is saved as"),
        ('{"axes": ["gpu"], "sizes": [2], "links": [{"gb_per_s": 1}]}', "is no topology: the links and the device"),
        (b"\xff\xfe", "is no topology: it is no JSON"),
    ],
)
def test_a_file_that_is_no_topology_is_named_with_the_reason(tmp_path, text, wrong):
    path = tmp_path / "links.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Error, match=rf"links\.json {wrong}(.|\n)*fix: "):
        Topology.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Error, match=r"links\.json cannot be read: No such file(.|\n)*calibrate"):
        Topology.load(tmp_path / "links.json")


@pytest.mark.parametrize(
    ("environ", "sizes"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (2, 4)),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}, (1, 8)),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, (2, 1)),
        # torchrun started by srun, one task a node: Slurm counts agents, not ranks
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            (2, 4),
        ),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "4"}, (2, 4)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (2, 4)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "3"}, (2, 4)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4,4", "SLURM_NNODES": "2"}, (2, 4)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"}, (1, 8)),
        # what this step runs, not what the job asked for
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_NTASKS_PER_NODE": "8"}, (4, 2)),
    ],
)
def test_the_launcher_gives_nodes_and_ranks_a_node(environ, sizes):
    assert Topology.from_torchrun(environ) == Topology(node=sizes[0], gpu=sizes[1])


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"},
        {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
        {"SLURM_NTASKS": "7", "SLURM_NTASKS_PER_NODE": "4"},
        {"SLURM_NTASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3"},
        {"SLURM_NTASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"},
        {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "3"},
        {"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4"},
    ],
)
def test_nodes_with_unequal_numbers_of_ranks_are_refused(environ):
    text = message(Topology.from_torchrun, environ)
    assert "nodes have unequal numbers of ranks" in text
    assert "same N" in text or "same number of ranks on every node" in text


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "8"}, {"LOCAL_WORLD_SIZE": "8"}, {"SLURM_NTASKS": "8"}])
def test_without_a_launcher_the_error_says_what_to_launch_with(environ):
    text = message(Topology.from_torchrun, environ)
    assert text.startswith("neither torchrun nor srun launched this process")
    assert "fix: launch with torchrun or srun, or write Topology(node=2, gpu=8)" in text


@pytest.mark.parametrize(
    ("environ", "wrong"),
    [
        ({"WORLD_SIZE": "eight", "LOCAL_WORLD_SIZE": "4"}, "WORLD_SIZE is 'eight'"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "SLURM_STEP_TASKS_PER_NODE is '4(y2)'"),
    ],
)
def test_unreadable_variables_are_named(environ, wrong):
    assert wrong in message(Topology.from_torchrun, environ)


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    assert Topology.from_torchrun() == Topology(node=2, gpu=3)


@pytest.mark.parametrize("local", [None, 1, 2, 8, 384])
def test_a_host_may_hold_whole_inner_axes(local):
    FRONTIER.check_world(384, local)


def test_a_job_of_another_size_is_refused():
    assert message(TWO.check_world, 4) == (
        "Topology(node=2, gpu=4) has 8 ranks, the job has 4\n  fix: launch 8 ranks, or change the sizes of the axes"
    )


@pytest.mark.parametrize("local", [3, 4, 16])
def test_an_axis_that_would_straddle_hosts_is_refused(local):
    text = message(FRONTIER.check_world, 384, local)
    assert f"a host runs {local} ranks (LOCAL_WORLD_SIZE)" in text
    assert "hold 1, 2, 8 or 384: an axis would straddle hosts" in text
    assert f"fix: make the inner axes multiply to {local}" in text


def test_the_mesh_lists_inner_axes_first(job):
    job(12)
    mesh = Topology(node=3, gpu=2, gcd=2).mesh("cpu")
    assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (("gcd", "gpu", "node"), (2, 2, 3))
    assert [mesh.mesh[tuple(Topology(node=3, gpu=2, gcd=2).coordinate(rank))].item() for rank in range(12)] == [
        *range(12)
    ]


def test_a_job_makes_the_process_groups_of_axes_once(job):
    job(4)
    mesh = Topology(node=2, gpu=2).mesh("cpu")
    assert Topology(node=2, gpu=2).mesh("cpu") is mesh
    assert Topology(host=2, gpu=2).mesh("cpu") is not mesh
    torch.distributed.destroy_process_group()
    job(4)
    assert Topology(node=2, gpu=2).mesh("cpu") is not mesh


def test_the_mesh_needs_a_process_group():
    text = message(TWO.mesh, "cpu")
    assert text.startswith("the process group is not initialised\n  fix: torch.distributed.init_process_group(...)")
    assert "torchrun with 8 ranks" in text


def test_the_mesh_checks_the_running_job(job, monkeypatch):
    job(4)
    assert "has 8 ranks, the job has 4" in message(TWO.mesh, "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert "an axis would straddle hosts" in message(Topology(node=2, gpu=2).mesh, "cpu")


def test_a_device_mesh_gives_its_dims_outermost_first(job):
    job(8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("node", "gpu"))
    assert Topology.from_mesh(mesh) == TWO


def test_a_device_mesh_without_names_is_refused(job):
    job(8)
    assert "the mesh has no dim names" in message(Topology.from_mesh, init_device_mesh("cpu", (2, 4)))


@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], [[4, 5], [6, 7]], [[1, 0], [2, 3]]])
def test_a_device_mesh_whose_ranks_are_not_row_major_is_refused_with_the_reason(job, ranks):
    job(8)
    text = message(Topology.from_mesh, DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("node", "gpu")))
    assert "not as 0 to 3 in row-major order: a topology finds a rank's place from its number" in text


def test_links_that_were_measured_in_other_terms_are_measured_again() -> None:
    saved = Link(1.0, 2.0, near=True, gather_us_per_mb=3.0).to_dict()
    assert Link.from_dict(saved) == Link(1.0, 2.0, near=True, gather_us_per_mb=3.0)
    with pytest.raises(Error, match=r"a link has no launch_us_per_mb(.|\n)*calibrate"):
        Link.from_dict(saved | {"launch_us_per_mb": 3.0})
    device = Device("cpu", 1.0, 1.0, 1.0, value_ns=0.5).to_dict()
    with pytest.raises(Error, match=r"a device has no slower_fused(.|\n)*calibrate"):
        Device.from_dict(device | {"slower_fused": 5.0})
