"""Care of the puzzle table: counting, resizing, resetting and replacing its rows.

The table is a buffer with one row per puzzle identifier, trained sparsely; a model for new puzzles needs new rows.
"""

import torch
from torch import nn


class PuzzleTableMixin:
    """Methods of a puzzle head that concern `self.model.puzzle_emb`."""

    def num_parameters(
        self, only_trainable: bool = False, exclude_embeddings: bool = False, include_puzzle_table: bool = False
    ) -> int:
        """As in transformers; the puzzle table, a buffer, is counted on request."""
        total = super().num_parameters(only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        if include_puzzle_table and self.model.puzzle_emb is not None:
            total += self.model.puzzle_emb.weight.numel()
        return total

    def resize_puzzle_embeddings(self, num_puzzles: int, new_rows: str = "mean") -> None:
        """Changes the number of puzzle identifiers, keeping the rows that remain.

        Args:
            new_rows: "mean" starts new rows at the mean of the present ones, "zero" at zero.
        """
        table = self._puzzle_table()
        if num_puzzles < 1:
            raise ValueError(f"num_puzzles={num_puzzles}; a puzzle table has at least one row, the blank identifier's")
        kept = table[:num_puzzles]
        fill = self._fill_row(new_rows).expand(max(0, num_puzzles - len(kept)), -1)
        self._replace_table(torch.cat((kept, fill)))

    def reset_puzzle_embeddings(self, rows: str = "mean") -> None:
        """Sets every row to the mean of the table, as TRM does before fine-tuning on new puzzles, or to zero."""
        self._replace_table(self._fill_row(rows).expand_as(self._puzzle_table()).clone())

    def set_puzzle_embeddings(self, table: torch.Tensor) -> None:
        """Replaces the whole table by [num_puzzle_identifiers, puzzle_emb_ndim] values.

        Raises:
            ValueError: the shape differs; resize first if the number of puzzles changes.
        """
        expected = tuple(self._puzzle_table().shape)
        if tuple(table.shape) != expected:
            raise ValueError(
                f"the puzzle table has shape {expected} (num_puzzle_identifiers, puzzle_emb_ndim), the new one "
                f"{tuple(table.shape)}; call resize_puzzle_embeddings({table.shape[0]}) first, or reset it"
            )
        self._replace_table(table)

    def adapt_puzzle_embeddings(self, num_puzzles: int, how: str) -> None:
        """Fits the table to a data set of `num_puzzles` identifiers before fine-tuning.

        Args:
            how: "keep" the table (same identifiers), "reset" it for new puzzles, or "extend" it by rows for more.

        Raises:
            ValueError: "keep" and the number of puzzles differs, or "extend" would shrink the table.
        """
        if self.model.puzzle_emb is None:
            return
        present = self.config.num_puzzle_identifiers
        if how == "reset":
            self.resize_puzzle_embeddings(num_puzzles)
            self.reset_puzzle_embeddings()
        elif how == "extend" and num_puzzles >= present:
            self.resize_puzzle_embeddings(num_puzzles)
        elif how != "keep" or num_puzzles != present:
            raise ValueError(
                f"puzzle_embeddings={how!r}: the model has {present} puzzle identifiers, the data {num_puzzles}. Use "
                '"reset" for new puzzles, "extend" if the data add puzzles to the known ones, "keep" for the same'
            )

    def _puzzle_table(self) -> torch.Tensor:
        if self.model.puzzle_emb is None:
            raise ValueError("this model has no puzzle table: its config says puzzle_emb_ndim=0")
        return self.model.puzzle_emb.weight

    def _fill_row(self, how: str) -> torch.Tensor:
        table = self._puzzle_table()
        if how not in ("mean", "zero"):
            raise ValueError(f'puzzle rows can start at "mean" or "zero", not {how!r}')
        return table.mean(0, keepdim=True) if how == "mean" else torch.zeros_like(table[:1])

    def _replace_table(self, table: torch.Tensor) -> None:
        old = self._puzzle_table()
        self.model.puzzle_emb.weight = nn.Buffer(table.to(device=old.device, dtype=old.dtype, copy=True).contiguous())
        self.config.num_puzzle_identifiers = table.shape[0]
