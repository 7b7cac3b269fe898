"""Compile time by stage, for models of 8 to 80 layers.

    python examples/bench/compile_time.py --layers 8 32 80 --world 1024
    python examples/bench/compile_time.py --layers 8 32 80 126 --plans zero3 --machine dgx-h100 --no-inductor

Everything but Inductor runs on a model of Llama-70B's widths on the meta device, for a mesh of any size, in one
process. On a machine with links (`--machine`) buckets and order go by cost, which takes longer. Inductor compiles the
distinct regions of a narrow model of the same depth; beside it, in the same run, Inductor on whole graphs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from llama import Config, Llama

import shardc
from passes.regions import Region, regions
from shardc.links import MACHINES
from shardc.lower import Lowering

STAGES = (
    *("dynamo", "capture", "decompose", "insert", "partition"),
    *("bucket", "chunk", "relay", "schedule", "variations", "verify", "regions"),
)
NARROW = {"dim": 64, "heads": 4, "kv_heads": 4, "hidden": 128, "vocab": 256, "context": 64}


def main() -> None:
    args = arguments()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, world {args.world}\n")
    print("Everything but Inductor, Llama-70B widths, seconds")
    print(f"{'plan':<8}{'layers':>7}" + "".join(f"{s:>11}" for s in STAGES) + f"{'total':>9}{'distinct regions':>18}")
    for plan in args.plans:
        for layers in args.layers:
            stages(plan, layers, topology_of(args))
    if not args.inductor:
        return
    print("\nInductor, narrow widths, zero3, seconds")
    print(f"{'layers':>7}{'distinct regions':>18}{'by region':>11}{'whole graph':>13}")
    for layers in args.layers:
        inductor(layers, topology_of(args), whole=layers <= args.whole_up_to)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 80])
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--plans", nargs="+", default=["zero3", "ddp"])
    parser.add_argument("--machine", choices=MACHINES, help="whose links there are")
    parser.add_argument("--inductor", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--whole-up-to", type=int, default=32, help="layers up to which whole graphs are compiled too")
    return parser.parse_args()


def topology_of(args: argparse.Namespace) -> shardc.Topology:
    nodes = args.world // 8
    return shardc.Topology.preset(args.machine, nodes=nodes) if args.machine else shardc.Topology(node=nodes, gpu=8)


def program_of(
    config: Config, plan: str, topology: shardc.Topology, dtype: torch.dtype = torch.bfloat16
) -> shardc.Program:
    with torch.device("meta"):
        model = Llama(config)
        ids = torch.zeros(1, config.context, dtype=torch.long)
    return shardc.trace(model, getattr(shardc.Plan, plan)(topology, param_dtype=dtype), ids, ids.clone(), keep=False)


def stages(plan: str, layers: int, topology: shardc.Topology) -> None:
    (program, known), total = timed(lambda: prepare(Config.llama_70b(layers), plan, topology))
    seconds = dict(program.run.seconds)
    seconds["variations"] = sum(seconds.pop(name, 0.0) for name in ("refresh", "accumulate", "sync"))
    seconds["dynamo"] = total - sum(seconds.values())
    row = "".join(f"{seconds.get(stage, 0.0):11.2f}" for stage in STAGES)
    print(f"{plan:<8}{layers:>7}{row}{total:9.2f}{len(known):18}", flush=True)


def prepare(config: Config, plan: str, topology: shardc.Topology) -> tuple[shardc.Program, dict[str, Region]]:
    """All that a training step with one micro-batch needs, up to the regions."""
    program = program_of(config, plan, topology)
    known: dict[str, Region] = {}
    for graph in (program.refreshed(), program.variation(synced=True, accumulated={})):
        program.run("regions", regions, graph, known)
    return program, known


def inductor(layers: int, topology: shardc.Topology, whole: bool) -> None:
    config = Config(layers=layers, **NARROW)
    torch._inductor.config.force_disable_caches = True
    program = program_of(config, "zero3", topology, torch.float32)
    groups = dict.fromkeys(("node", "gpu"), "none")
    lowering = Lowering("inductor", groups)
    by_region = timed(lambda: lower(program, lowering))[1]
    line = f"{layers:>7}{len(lowering.known):18}{by_region:11.1f}"
    print(line + (f"{whole_graph(program):13.1f}" if whole else f"{'-':>13}"), flush=True)


def lower(program: shardc.Program, lowering: Lowering) -> None:
    lowering(program.refreshed(), "forward")
    lowering(program.variation(synced=True, accumulated={}), "backward")


def whole_graph(program: shardc.Program) -> float:
    """Groups must exist for torch's functional collectives to be compiled, so a fake process group stands in."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    topology = next(iter(program.params.values())).layout.axes
    mesh = shardc.Topology(**dict(reversed(topology))).mesh("cpu")
    groups = {axis: mesh.get_group(axis).group_name for axis, _ in topology}
    return timed(lambda: lower(program, Lowering("inductor-whole", groups)))[1]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
