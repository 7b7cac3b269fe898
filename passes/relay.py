"""Relay: a hop that takes just what another hop brings takes it from there, without a wait of compute in between.

    def forward(w: f32[2, 4], x: f32[2, 8]):
        a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
        f: f32[4, 4] = wait(a)
        b: f32[8, 4] = all_gather(f, 'gpu', 2, purpose='gather', params=['w'], again=True)
        g: f32[8, 4] = wait(b)
        y: f32[2, 4] = mm(x, g)
        return ([y], [x, f])

becomes

    def forward(w: f32[2, 4], x: f32[2, 8]):
        a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
        f: f32[4, 4] = wait(a)
        b: f32[8, 4] = all_gather(a, 'gpu', 2, purpose='gather', params=['w'], again=True)
        g: f32[8, 4] = wait(b)
        y: f32[2, 4] = mm(x, g)
        return ([y], [x, f])

The hops of a chain then follow each other on their lanes, whatever compute is doing; what else uses an inner value
(here: what is saved) waits for it on its own, and an inner wait that nothing else uses goes. So PaRO's HO-Ring (arXiv
2310.06003), the hops of several chains at the same time, falls out of an order of hops.
"""

from __future__ import annotations

from torch import fx

from passes import ops


def relay(graph: fx.Graph) -> fx.Graph:
    """Edits in place."""
    for wait in graph.find_nodes(op="call_function", target=ops.wait):
        for user in list(wait.users):
            if ops.is_start(user):
                user.replace_input_with(wait, wait.args[0])
        if not wait.users:
            graph.erase_node(wait)
    return graph


def unrelayed(graph: fx.Graph) -> fx.Graph:
    """For compilers that know no lanes: a hop takes what another one brings behind a wait again. Edits in place."""
    for start in ops.hops(graph):
        earlier = ops.relayed(start)
        if earlier is None:
            continue
        wait = ops.wait_of(earlier)
        with graph.inserting_before(start):
            here = wait if wait and wait < start else graph.call_function(ops.wait, (earlier,))
        here.meta.update(earlier.meta)
        start.replace_input_with(earlier, here)
        if wait and wait is not here:
            wait.replace_all_uses_with(here)
            graph.erase_node(wait)
    return graph
