"""Cheap exchange between the positions of a board, in place of attention: `SeRrmPuzzleConfig.mixing`.

Each takes states [N, S, D] to what is to be added to them. Source: ours; `PositionSwiGLU` is TRM's mlp_t.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_hrm_puzzle import HrmPuzzleConfig
from .puzzle_layers import SwiGLU, linear_class


class UnitMeans(nn.Module):
    """For every cell, linear maps of the means over its row, its column and its box.

    Means and their return to the cells are products with `members` [units, S], which holds 1 where a cell is in a
    unit: on a CPU four times faster than means over axes of the board.
    """

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__()
        (rows, columns), (box_rows, box_columns) = config.grid_shape, config.box_shape
        self.grid_shape, self.box_shape = config.grid_shape, config.box_shape
        self.counts = [rows, columns, rows * columns // (box_rows * box_columns)]
        linear, D = linear_class(config), config.hidden_size
        self.row, self.column, self.box = (linear(D, D, bias=False) for _ in range(3))
        self.members = nn.Buffer(torch.empty(sum(self.counts), rows * columns), persistent=False)

    def member_table(self) -> torch.Tensor:
        """float32 [units, S]: 1 where a cell is in a unit; rows, then columns, then boxes."""
        (rows, columns), (box_rows, box_columns) = self.grid_shape, self.box_shape
        cells = torch.arange(rows * columns)
        row, column = cells // columns, cells % columns
        units = (row, column, row // box_rows * (columns // box_columns) + column // box_columns)
        return torch.cat([F.one_hot(unit, count).T for unit, count in zip(units, self.counts)]).float()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        members = self.members.to(hidden_states.dtype)
        means = (members / members.sum(1, keepdim=True)) @ hidden_states
        parts = zip((self.row, self.column, self.box), means.split(self.counts, dim=1))
        return members.T @ torch.cat([linear(part) for linear, part in parts], dim=1)


class Neighbours(nn.Module):
    """For every cell, linear maps of the cells above, below, left and right, which are zero beyond the border."""

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__()
        self.grid_shape = config.grid_shape
        self.linear = linear_class(config)(4 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = F.pad(hidden_states.unflatten(1, self.grid_shape), (0, 0, 1, 1, 1, 1))
        around = (wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:])
        return self.linear(torch.cat(around, dim=-1).flatten(1, 2))


class PositionSwiGLU(SwiGLU):
    """A SwiGLU over the position axis."""

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__(config.seq_len, config, config.position_intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.transpose(1, 2)).transpose(1, 2)


MIXERS = {"mlp_t": PositionSwiGLU, "units": UnitMeans, "neighbours": Neighbours}
