"""Real wires: training on hosts with slow links, shardc beside DDP, FSDP2 and HSDP.

    sudo python examples/bench/wire.py                          # everything: a day
    sudo python examples/bench/wire.py --layouts 2x2 --rates 400mbit --micro-batches 1
    sudo python examples/bench/wire.py --rows ddp fsdp2 shardc-IIG --rates 2gbit --steps 3
    sudo python examples/bench/wire.py --layouts 1x1 2x1 4x1 --rates 400mbit   # how it scales
    python examples/bench/wire.py --tables                      # of what has been measured

Hosts are network namespaces of this machine (`hosts.py`), so processes, Gloo and TCP are real. All train a Llama-like
model of 16.9M parameters with AdamW, one sequence of 128 tokens a rank and micro-batch; what the systems are is said in
`wire_rows.py`, how they are measured in `wire_worker.py`.

Each row is a job of its own, though starting one takes longer than its steps: what a row before has left behind
(compiled code, buffers of process groups) would be in the peak memory of the next, and a row that dies takes no other
with it. But machines get slower and faster within minutes, and rows that ran one after the other cannot be told apart
to a hundredth. So the planner's choice, shardc's other rows of the same formats and the best baseline run once more, in
one job, a few steps of each in turns. Every finished job is a line of `jobs.jsonl` in `--out`; with `--resume` those
that are there are not run again. Tables and plots are made of that file, and written beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hosts import Hosts, Missing, end_with_parent
from wire_rows import ALONE, OURS, ROWS, Task
from wire_table import NOTE, Record, Setting, Table, plot, scaling, settings

TIMEOUT_S = 3 * 3600.0
"""for one job"""
KEY = ("layout", "rate", "micro_batches", "row", "warmup", "steps", "measure")
"""what tells one job from another"""
ON_THIS_HOST = ("search/", "one-process/")
"""jobs of one process"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", type=layout, default=["2x2", "2x1"], help="hosts x processes a host")
    parser.add_argument("--rates", nargs="+", default=["2gbit", "400mbit", "100mbit"], help="of links, as tc has them")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that count, the first compiles")
    parser.add_argument("--measure", action="store_true", help="shardc times its regions before it schedules")
    parser.add_argument("--out", type=Path, default=Path("out/wire"))
    parser.add_argument("--resume", action="store_true", help="go on where a run has ended")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def layout(text: str) -> str:
    hosts, _, processes = text.partition("x")
    if not (hosts.isdecimal() and processes.isdecimal() and int(hosts) > 0 and int(processes) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not such as 2x2: hosts, and processes a host")
    return text


def main() -> int:
    options = arguments()
    if options.worker:
        return worker(options.worker)
    signal.signal(signal.SIGTERM, lambda *of_signal: sys.exit(143))  # so that hosts are removed
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each rank starts a pool of compilers
    options.out.mkdir(parents=True, exist_ok=True)
    records = Records(options.out / "jobs.jsonl")
    if records.all and not (options.resume or options.tables):
        print(f"wire.py: {records.path} has {len(records.all)} jobs: --resume, or another --out", file=sys.stderr)
        return 2
    if not options.tables:
        try:
            for text in options.layouts:
                run_layout(options, text, records)
        except Missing as missing:
            print(f"wire.py: {missing}", file=sys.stderr)
            return 2
    text = write(records, options.out)
    print(text if options.tables else NOTE)
    return int(any("error" in record for record in records.all))


def worker(path: Path) -> int:
    """One job, in the process that has it."""
    from wire_worker import work

    job = json.loads(path.read_text())
    work(Task(**job["task"]), Path(job["out"]))
    return 0


class Records:
    """Finished jobs, kept in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.all: list[Record] = []
        for text in path.read_text().splitlines() if path.exists() else ():
            self._replace(json.loads(text))

    def add(self, record: Record) -> None:
        self._replace(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _replace(self, record: Record) -> None:
        """In the place of one of the same job, which has failed."""
        self.all = [*(r for r in self.all if not same(r, record)), record]

    def find(self, job: Record) -> Record | None:
        return next((r for r in self.all if same(r, job) and "error" not in r), None)


def same(a: Record, b: Record) -> bool:
    return all(a.get(key) == b.get(key) for key in KEY)


@dataclass
class Bench:
    """Runs jobs of one layout."""

    options: argparse.Namespace
    layout: str
    hosts: Hosts
    records: Records

    def task(self, row: str, rate: str = "", micro_batches: int = 1, **more: Any) -> Task:
        hosts, processes = map(int, self.layout.split("x"))
        given, measure = self.options, self.options.measure and row in ROWS and ROWS[row].kind == OURS
        return Task(row, hosts, processes, rate, micro_batches, given.warmup, given.steps, measure=measure, **more)

    def __call__(self, task: Task) -> Record:
        """What has come of a task, now or before."""
        about = {"layout": self.layout, **asdict(task)}
        job = {key: about[key] for key in (*KEY, "memory")}
        if found := self.records.find(job):
            return found
        began = time.monotonic()
        try:
            record = job | self._result(task)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            record = job | {"error": str(error)}
        record["took_s"] = time.monotonic() - began
        self.records.add(record)
        print(line(record), flush=True)
        return record

    def _result(self, task: Task) -> dict[str, Any]:
        """Raises `RuntimeError` with what a job has printed, where it fails."""
        with tempfile.TemporaryDirectory() as folder:
            job, out = Path(folder, "task.json"), Path(folder, "result.json")
            job.write_text(json.dumps({"task": asdict(task), "out": str(out)}))
            command = [str(Path(__file__).resolve()), "--worker", str(job)]
            if task.row.startswith(ON_THIS_HOST):
                run_here(command)
            else:
                self.hosts.rate(task.rate or None)
                self.hosts.torchrun(command, processes=task.processes, timeout_s=TIMEOUT_S)
            return json.loads(out.read_text())


def run_here(command: list[str]) -> None:
    """In a process of this host."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=TIMEOUT_S, preexec_fn=end_with_parent
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}\n{done.stderr[-3000:]}")


def line(record: Record) -> str:
    """Of one finished job, to read while others run."""
    about = f"{record['layout']} {record['rate']} M={record['micro_batches']} {record['row']}".replace("  ", " ")
    if "error" in record:
        return f"{about}: FAILED, {reason(record['error'])}"
    steps = sorted(record.get("steps_s", []))
    step = f"{steps[len(steps) // 2]:.3f} s a step, " if steps else ""
    return f"{about}: {step}{record['took_s']:.0f} s in all"


def reason(output: str) -> str:
    """The first exception in what a job has printed; all of it is in the record."""
    named = re.search(r"^(?:\[rank\d+\]:\s*)?([\w.]*(?:Error|Exception)\b.*)$", output, re.MULTILINE)
    return named[1] if named else output.strip().splitlines()[0]


def run_layout(options: argparse.Namespace, text: str, records: Records) -> None:
    with Hosts(int(text.split("x")[0])) as hosts:
        bench = Bench(options, text, hosts, records)
        names = {count: rows_of(bench, count) for count in options.micro_batches}
        for count in options.micro_batches:
            for task in beside(bench, names[count], count):
                bench(task)
        for rate in options.rates:
            calibrated = bench(bench.task("calibrate", rate))
            links = {key: calibrated.get(key) for key in ("topology", "piece_us")}
            for count in options.micro_batches:
                tasks = [bench.task(name, rate, count, **links) for name in names[count]]
                for task in tasks:
                    run_row(bench, task)
                for task in tasks:
                    run_turns(bench, task)
                print(f"\n{Table(records.all, Setting(text, rate, count))}\n", flush=True)


def rows_of(bench: Bench, micro_batches: int) -> list[str]:
    """Rows over links. It is said which are left out, and why."""
    found = []
    for name, row in ROWS.items():
        if row.kind == ALONE or (bench.options.rows and name not in bench.options.rows):
            continue
        if reason := row.where(bench.task(name, micro_batches=micro_batches)):
            print(f"{bench.layout} M={micro_batches} {name} is left out: {reason}", flush=True)
        else:
            found.append(name)
    return found


def beside(bench: Bench, names: list[str], micro_batches: int) -> Iterator[Task]:
    """What rows are compared with: themselves without communication, and losses of one process."""
    rows = [ROWS[name] for name in names]
    updates = {"alone-lora" if row.lora else "alone" for row in rows}
    for name in sorted({row.beside for row in rows} | updates):
        yield bench.task(name, micro_batches=micro_batches)
    for name in sorted(updates):
        yield bench.task(f"one-process/{name}", micro_batches=micro_batches)


def run_row(bench: Bench, task: Task) -> None:
    """What needs links waits for none that could not be measured."""
    if ROWS[task.row].kind == OURS and not task.topology:
        print(f"{task.row} is left out: links were not measured", flush=True)
        return
    if is_planner(task) and memory_of_best(bench, task) is None:
        print(f"{task.row}: there is no baseline; memory is all that the machine has", flush=True)
    if complete := completed(bench, task):
        bench(complete)


def completed(bench: Bench, task: Task) -> Task | None:
    """With its memory limit. The planner is asked for its plan, if it finds one."""
    if not is_planner(task):
        return replace(task, memory=memory_of(bench, task, ROWS[task.row].as_small_as))
    memory = memory_of_best(bench, task)
    found = bench(replace(task, row=f"search/{task.row.removeprefix('planner')}", memory=memory))
    return replace(task, plan=found["plan"], memory=memory) if "plan" in found else None


def is_planner(task: Task) -> bool:
    return task.row.startswith("planner")


def run_turns(bench: Bench, task: Task) -> None:
    """Of the planner's choice, what it could have been, and the best baseline."""
    table = table_of(bench, task)
    if not is_planner(task) or task.row not in table.rows:
        return
    best = table.best(task.row)
    names = [task.row, *table.alike(task.row), *([best] if best else [])]
    if len(names) > 1:
        tasks = (completed(bench, replace(task, row=name)) for name in names)
        bench(replace(task, row=f"turns/{','.join(names)}", turns=[asdict(each) for each in tasks if each]))


def table_of(bench: Bench, task: Task) -> Table:
    return Table(bench.records.all, Setting(bench.layout, task.rate, task.micro_batches))


def memory_of(bench: Bench, task: Task, row: str) -> int | None:
    """Peak bytes of a row that ran before."""
    found = table_of(bench, task).rows.get(row)
    return int(found["peak_bytes"]) if found else None


def memory_of_best(bench: Bench, task: Task) -> int | None:
    """Peak bytes of the fastest baseline of the same precision."""
    best = table_of(bench, task).best(task.row)
    return memory_of(bench, task, best) if best else None


def write(records: Records, folder: Path) -> str:
    """All tables as one file, and plots; returns the tables."""
    tables = [Table(records.all, setting) for setting in settings(records.all)]
    text = "\n\n".join([*map(str, tables), *scaling(tables), NOTE])
    (folder / "tables.md").write_text(text + "\n")
    print(f"written to {folder / 'tables.md'}")
    try:
        print(*(f"written to {path}" for path in plot(tables, folder)), sep="\n")
    except ImportError as error:
        print(f"No plot: {error}. Install matplotlib (it is one of shardc[dev]), and run this with --tables.")
    return text


if __name__ == "__main__":
    sys.exit(main())
