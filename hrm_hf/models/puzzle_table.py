"""The puzzle table, with one trained row per puzzle identifier, and methods to count and resize rows."""

import torch
from torch import nn


class PuzzleEmbedding(nn.Module):
    """Table with one row per puzzle identifier, trained sparsely by sign descent.

    The table can have a million rows. It is a buffer and not a parameter, so the dense optimizer, DDP and weight
    averaging skip it. In training, the rows in use are a leaf of the graph, and their gradient is added to
    a sparse `table.grad`, which `hrm_hf.trainer.optim.SignSGD` reads.
    """

    def __init__(self, num_puzzles: int, ndim: int):
        super().__init__()
        self.weight = nn.Buffer(torch.zeros(num_puzzles, ndim))

    def _apply(self, fn, recurse=True):
        """Move the table in place, as torch does with parameters, because an optimizer may already refer to it."""
        table = self.weight
        super()._apply(fn, recurse)
        if self.weight is not table and not table.is_meta and not self.weight.is_meta:
            table.data, self.weight = self.weight.data, table
        return self

    def forward(self, puzzle_identifiers: torch.Tensor) -> torch.Tensor:
        """Return the rows [B, ndim] for identifiers [B]. On the CPU, raise ValueError for unknown identifiers."""
        if puzzle_identifiers.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (value.item() for value in torch.aminmax(puzzle_identifiers))
            if low < 0 or high >= len(self.weight):
                raise ValueError(
                    f"puzzle_identifiers={low}..{high}: must be in [0, {len(self.weight) - 1}], the rows of the table"
                )
        rows = self.weight[puzzle_identifiers]
        if self.training and torch.is_grad_enabled():
            table, ids = self.weight, puzzle_identifiers.long()
            rows = rows.detach().requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: _add_sparse_grad(table, ids, leaf.grad))
        return rows


def _add_sparse_grad(table: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor) -> None:
    sparse = torch.sparse_coo_tensor(ids.unsqueeze(0), grad.to(table.dtype), table.shape, check_invariants=False)
    table.grad = sparse if table.grad is None else table.grad + sparse


class PuzzleTableMixin:
    """Mixin for puzzle heads with methods to count, resize and reset the table `self.model.puzzle_emb`."""

    def num_parameters(
        self, only_trainable: bool = False, exclude_embeddings: bool = False, include_puzzle_table: bool = False
    ) -> int:
        """Count parameters as transformers does, optionally including the puzzle table, which is a buffer."""
        total = super().num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        if include_puzzle_table and self.model.puzzle_emb is not None:
            total += self.model.puzzle_emb.weight.numel()
        return total

    def resize_puzzle_embeddings(self, num_puzzles: int) -> None:
        """Change the number of puzzle identifiers. New rows are initialized to the mean of the existing rows."""
        table = self._puzzle_table()
        if num_puzzles < 1:
            raise ValueError(f"num_puzzles={num_puzzles}: must be >= 1, because identifier 0 is the blank")
        new = table.mean(0, keepdim=True).expand(max(0, num_puzzles - len(table)), -1)
        self.model.puzzle_emb.weight = nn.Buffer(torch.cat((table[:num_puzzles], new)))
        self.config.num_puzzle_identifiers = num_puzzles

    def reset_puzzle_embeddings(self) -> None:
        """Set every row to the table's mean, as TRM does before fine-tuning on new puzzles."""
        table = self._puzzle_table()
        table.copy_(table.mean(0, keepdim=True).expand_as(table))

    def order_puzzle_embeddings(self, places: list[int]) -> None:
        """Reorder the table by moving row `places[i]` to row i."""
        table = self._puzzle_table()
        table.copy_(table[torch.tensor(places, device=table.device)])

    def adapt_puzzle_embeddings(self, num_puzzles: int, how: str) -> None:
        """Resize or reset the table before fine-tuning on a data set with `num_puzzles` identifiers.

        `how` is "keep" if the identifiers are the same, "reset" for new puzzles, and "extend" to add rows.
        """
        if self.model.puzzle_emb is None:
            return
        present = self.config.num_puzzle_identifiers
        if how == "reset" or (how == "extend" and num_puzzles >= present):
            self.resize_puzzle_embeddings(num_puzzles)
            if how == "reset":
                self.reset_puzzle_embeddings()
        elif how != "keep" or num_puzzles != present:
            raise ValueError(
                f"puzzle_embeddings={how!r}: the model has {present} puzzle identifiers and the data {num_puzzles}; "
                'use "reset" for new puzzles, "extend" if the data adds puzzles, or "keep" for the same puzzles'
            )

    def _puzzle_table(self) -> torch.Tensor:
        if self.model.puzzle_emb is None:
            raise ValueError("puzzle_emb_ndim=0: this model has no puzzle table")
        return self.model.puzzle_emb.weight
