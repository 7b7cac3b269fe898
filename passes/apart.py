"""Apart: a small gradient that waits for later micro-batches is copied out of its bucket, all of which it would keep.

    def backward(t: f32[2, 34]):
        ''
        r: f32[1, 34] = reduce_scatter(t, 'gpu', 2, purpose='reduce', params=['w', 'b'])
        d: f32[1, 34] = wait(r)
        split_with_sizes = split_with_sizes(d, [32, 2], 1)
        g: f32[1, 32] = split_with_sizes[0]
        h: f32[1, 2] = split_with_sizes[1]
        return {'w': g, 'b': h}

becomes

    def backward(t: f32[2, 34]):
        ''
        r: f32[1, 34] = reduce_scatter(t, 'gpu', 2, purpose='reduce', params=['w', 'b'])
        d: f32[1, 34] = wait(r)
        split_with_sizes = split_with_sizes(d, [32, 2], 1)
        g: f32[1, 32] = split_with_sizes[0]
        h: f32[1, 2] = split_with_sizes[1]
        clone: f32[1, 2] = clone(h, memory_format=contiguous_format)
        return {'w': g, 'b': clone}

The last backward of a step adds `g` to its own and sends the sum on in one bucket; `h`, such as that of a norm, may go
with those of all other layers, when everything else is over. Were it a view, the memory of `g` would be held until
then, of every layer. (A Llama of six layers held 16 MiB of 244 MiB that way.)
"""

from __future__ import annotations

import torch
from torch import fx

from passes import ops
from passes.build import Writer, behind, fake_mode, outputs, set_outputs
from passes.memory import lives

SMALL = 16
"""times as small as the memory that it would keep, and more"""


def apart(graph: fx.Graph) -> fx.Graph:
    """Of a backward that does not sync, in buckets. Edits in place."""
    grads, mode = dict(outputs(graph)), fake_mode(graph)
    held = {node: life.bytes for life in lives(graph) if ops.is_hop(life.node) for node in life.values}
    for name, grad in grads.items():
        if grad in held and SMALL * grad.meta["val"].nbytes <= held[grad]:
            write = Writer(graph, mode, grad.meta.get("module", ""))
            with graph.inserting_before(behind(grad)):
                grads[name] = write(torch.ops.aten.clone.default, grad, memory_format=torch.contiguous_format)
    set_outputs(graph, grads)
    return graph
