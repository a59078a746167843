"""Trees of tokens below prompts: their logits by tree passes, and by plain forwards."""

import torch

from recsys.models.mask import prompt_mask, tree_mask

VOCABULARY = 64
SLOTS = 16  # of the prompts, and of the nodes
PROMPTS = [[5, 9, 2, 7, 11, 13, 3, 8, 21, 30, 17], [4, 40, 6, 12]]
TREES = {"wide": [-1, -1, 0, 0, 1, 2, 4, 5], "deep": [-1, 0, 1, 2, 3, -1, 5, 5]}  # parents


class Tree:
    """A tree of tokens below each of the two prompts, its nodes in slots at random."""

    def __init__(self, parents, seed):
        draw = torch.Generator().manual_seed(seed)
        self.size, self.paths, depth = len(parents), [], []
        for node, parent in enumerate(parents):
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), node])
            depth.append(len(self.paths[-1]))
        self.tokens = torch.randint(3, VOCABULARY, (2, self.size), generator=draw)
        self.slots = torch.stack([torch.randperm(SLOTS, generator=draw) for _ in PROMPTS])
        self.slots = self.slots[:, : self.size]
        self.depth = torch.tensor(depth).expand(2, -1)
        self.slot_depth = torch.zeros((2, SLOTS), dtype=torch.int64)
        self.ancestors = torch.zeros((2, self.size, SLOTS), dtype=torch.bool)
        for b, slots in enumerate(self.slots):
            self.slot_depth[b, slots] = self.depth[b]
            for node, path in enumerate(self.paths):
                self.ancestors[b, node, slots[path]] = True

    def by_tree_passes(self, model):
        """(2, 1 + nodes, V) logits of the prompts' ends and of the nodes, in two passes."""
        lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
        places = torch.minimum(torch.arange(max(lengths)), lengths[:, None] - 1)
        prompts = torch.tensor(
            [[p[i] for i in row] for p, row in zip(PROMPTS, places, strict=True)]
        )
        half, found = self.size // 2, []
        with model.pool.lend(2, SLOTS, SLOTS) as cache:
            for here in (slice(0, half), slice(half, self.size)):
                depth = self.depth[:, here]
                parts = [
                    (
                        self.tokens[:, here],
                        lengths[:, None] + depth - 1,
                        self.slots[:, here] + SLOTS,
                    )
                ]
                if not here.start:
                    parts.insert(0, (prompts, places, places))
                tokens, positions, write = (torch.cat(p, dim=1) for p in zip(*parts, strict=True))

                def mask(window, here=here, depth=depth):
                    looks = {"window": window, "dtype": model.dtype}
                    nodes = tree_mask(
                        self.ancestors[:, here], lengths, SLOTS,
                        depth=depth, node_depth=self.slot_depth, **looks,
                    )  # fmt: skip
                    first = [] if here.start else [prompt_mask(places, 2 * SLOTS, **looks)]
                    return torch.cat([*first, nodes], dim=2)

                logits = model.forward(tokens, positions, mask, cache, write=write, view=2 * SLOTS)
                found.append(logits[:, 0 if here.start else len(places[0]) - 1 :])
        return torch.cat(found, dim=1)

    @torch.inference_mode()
    def by_plain_forwards(self, model, prompts=PROMPTS):
        """The same logits by one plain forward of each prompt and path to a leaf, alone."""
        inner = {node for path in self.paths for node in path[:-1]}
        rows = []
        for prompt, tokens in zip(prompts, self.tokens, strict=True):
            found = {}
            for path in self.paths:
                if path[-1] not in inner:
                    whole = torch.tensor([[*prompt, *tokens[path].tolist()]])
                    logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 :]
                    found |= dict(zip([-1, *path], logits, strict=True))
            rows.append(torch.stack([found[node] for node in range(-1, self.size)]))
        return torch.stack(rows).to(torch.float64)
