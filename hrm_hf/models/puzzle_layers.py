"""Layers of the puzzle models: embeddings, post-norm blocks, and levels that stack the blocks.

Differences from the usual transformer, all from the original HRM code: RMS norms without gains, normalization after
the residual sum, attention over all positions without a mask, weights cast to the activations' dtype on use, and
embeddings scaled by sqrt(D). Source: Wang et al. 2025, arXiv 2506.21734.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward, rotate_half

from .configuration_hrm_puzzle import HrmPuzzleConfig
from .modeling_utils import validate_ids


# Standard deviation of a standard normal truncated at -2 and 2. Truncated samples divided by it have a std of 1.
TRUNCATED_STD = 0.87962566103423978
REDRAWS = 3


def truncated_normal_(tensor: torch.Tensor, std: float) -> torch.Tensor:
    """Fill `tensor` with normal samples truncated at two standard deviations, then rescale them to `std`."""
    scale = std / TRUNCATED_STD
    return init.trunc_normal_(tensor, mean=0.0, std=scale, a=-2 * scale, b=2 * scale)


def truncated_normal_like(tensor: torch.Tensor, std: float) -> torch.Tensor:
    """Draw from the same distribution as `truncated_normal_`, in a way that compiles to fast code.

    Values beyond two stds are redrawn up to three times. One value in 230,000 is then still outside and is clamped.
    (The inverse error function would be exact, but on a CPU it takes longer than a compiled pass of the network.)
    """
    draw = torch.randn_like(tensor, dtype=torch.float32)
    for _ in range(REDRAWS):
        draw = torch.where(draw.abs() > 2, torch.randn_like(draw), draw)
    return (draw.clamp(-2, 2) * (std / TRUNCATED_STD)).to(tensor.dtype)


def rms_norm(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMS normalization without gain, in float32. On the CPU, this is faster than torch's version."""
    wide = hidden_states.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(hidden_states.dtype)


class CastedLinear(nn.Linear):
    """Linear layer that casts its weights to the dtype of its input."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(hidden_states.dtype)
        return F.linear(hidden_states, self.weight.to(hidden_states.dtype), bias)


def linear_class(config: HrmPuzzleConfig) -> type[nn.Linear]:
    """Return the class for linear layers in blocks: `CastedLinear`, or nn.Linear for quantization.

    bitsandbytes replaces nn.Linear but not subclasses. The layers of bitsandbytes also follow the input's dtype.
    """
    return CastedLinear if getattr(config, "quantization_config", None) is None else nn.Linear


class QHead(CastedLinear):
    """Q values for halting (row 0) and continuing (row 1). Initial weights are 0, initial biases -5."""


class PoolingScores(CastedLinear):
    """Layer that computes softmax-pooling scores. It is initialized to 0, so pooling starts as a mean."""


class PuzzleAttention(nn.Module):
    """Multi-head attention over all positions, with a fused projection (rows: q, k and v heads)."""

    is_causal = False
    num_key_value_groups = 1

    def __init__(
        self, config: HrmPuzzleConfig, layer_idx: int, num_heads: int | None = None, head_dim: int | None = None
    ):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = num_heads or config.num_attention_heads, head_dim or config.head_dim
        self.scaling = self.head_dim**-0.5
        self.dropout = getattr(config, "attention_dropout", 0.0)
        self.rotary_parts = getattr(config, "rotary_parts", 1)  # reading a config field takes microseconds
        linear, width = linear_class(config), self.num_heads * self.head_dim
        self.qkv_proj = linear(config.hidden_size, 3 * width, bias=False)
        self.o_proj = linear(width, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        num_queries: int | None = None,
    ) -> torch.Tensor:
        """Attend from the first `num_queries` positions in hidden_states [B, T, D], or from all if it is None."""
        heads = self.num_heads
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (3 * heads, self.head_dim))
        query_key, value = qkv.split((2 * heads, heads), dim=2)
        if rotary is not None:
            cos, sin = rotary
            wide = query_key.float()
            turned = rotate_half(wide.unflatten(-1, (self.rotary_parts, -1))).flatten(-2)
            query_key = (wide * cos + turned * sin).to(qkv.dtype)
        query, key = query_key.split(heads, dim=2)
        query, key, value = query[:, :num_queries].transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.dropout if self.training else 0.0
        output, _ = attend(self, query, key, value, None, scaling=self.scaling, dropout=dropout, is_causal=False)
        return self.o_proj(output.flatten(2))


class SwiGLU(nn.Module):
    """SwiGLU, down(silu(gate) * up), over the last axis. Gate and up are fused (rows: gate, up)."""

    def __init__(self, size: int, config: HrmPuzzleConfig, width: int | None = None):
        super().__init__()
        linear = linear_class(config)
        # The default is two thirds of `expansion * size`, rounded up to a multiple of 256.
        width = width or -(-round(config.expansion * size * 2 / 3) // 256) * 256
        self.gate_up_proj = linear(size, 2 * width, bias=False)
        self.down_proj = linear(width, size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class PuzzleBlock(GradientCheckpointingLayer):
    """Post-norm block: h = RMS(h + attention(h)), then h = RMS(h + mlp(h))."""

    def __init__(self, config: HrmPuzzleConfig, layer_idx: int):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.mix_positions(config, layer_idx)
        self.mlp = SwiGLU(config.hidden_size, config, getattr(config, "intermediate_size", None))

    def mix_positions(self, config: HrmPuzzleConfig, layer_idx: int) -> None:
        """Build the layer that mixes information between positions (attention in this class)."""
        self.self_attn = PuzzleAttention(config, layer_idx)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        num_queries: int | None = None,
    ) -> torch.Tensor:
        attended = self.self_attn(hidden_states, rotary, num_queries)
        hidden_states = rms_norm(hidden_states[:, :num_queries] + attended, self.eps)
        return rms_norm(hidden_states + self.mlp(hidden_states), self.eps)


class ReasoningLevel(nn.Module):
    """Stack of blocks that adds another state or input to a latent state and refines the sum."""

    def __init__(self, config: HrmPuzzleConfig, num_layers: int, block: type[PuzzleBlock] = PuzzleBlock):
        super().__init__()
        self.layers = nn.ModuleList(block(config, index) for index in range(num_layers))

    def forward(
        self,
        hidden_states: torch.Tensor,
        injection: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        num_queries: int | None = None,
    ) -> torch.Tensor:
        """Refine hidden_states [B, T, D] after adding `injection` [B, T, D].

        The result contains only the first `num_queries` positions, or all T positions if None.
        """
        hidden_states = hidden_states + injection
        *others, last = self.layers
        for layer in others:
            hidden_states = layer(hidden_states, rotary)
        return last(hidden_states, rotary, num_queries)


def one_step_gradient(
    H_level: nn.Module,
    L_level: nn.Module,
    cycles: tuple[int, int],
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    z_H: torch.Tensor,
    z_L: torch.Tensor,
    num_queries: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run cycles of low- and high-level updates, with gradients only in each level's last update.

    A cycle has L_cycles low-level updates, then one high-level update. x, z_H and z_L are [B, T, D]; `num_queries`
    limits the positions of the final z_H. Source: section 2 of the HRM paper, "one-step gradient".
    """
    H_cycles, L_cycles = cycles
    with torch.no_grad():
        for h in range(H_cycles):
            last_cycle = h == H_cycles - 1
            for _ in range(L_cycles - last_cycle):
                z_L = L_level(z_L, z_H + x, rotary)
            if not last_cycle:
                z_H = H_level(z_H, z_L, rotary)
    z_L = L_level(z_L, z_H + x, rotary)
    return H_level(z_H, z_L, rotary, num_queries), z_L


def last_cycle_gradient(
    cycle: Callable,
    H_cycles: int,
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    z_H: torch.Tensor,
    z_L: torch.Tensor,
    num_queries: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run cycles, with gradients only in the last one. Arguments are as in `one_step_gradient`.

    `cycle` maps (x, rotary, z_H, z_L, num_queries) to the new z_H and z_L. Source: the TRM paper, arXiv 2510.04871.
    """
    with torch.no_grad():
        for _ in range(H_cycles - 1):
            z_H, z_L = cycle(x, rotary, z_H, z_L)
    return cycle(x, rotary, z_H, z_L, num_queries)


class PuzzleInputEmbedding(nn.Module):
    """Embeds the puzzle row (P prefix slots) and the tokens as the input x [B, P + S, D] to every level."""

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__()
        self.config = config
        self.make_tables(config)
        if config.rotary_parts:
            # Store cos and sin tables, because a compiled step would recompute them in every block.
            shape = (1, config.max_position_embeddings, 1, config.head_dim)
            self.cos = nn.Buffer(torch.empty(shape), persistent=False)
            self.sin = nn.Buffer(torch.empty(shape), persistent=False)

    def make_tables(self, config: HrmPuzzleConfig) -> None:
        """Build the trainable embeddings of tokens and positions."""
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.pos_encodings == "learned":
            self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def coordinates(self) -> list[torch.Tensor]:
        """Return the rotary coordinates, [T] each: the position, or the row and the column."""
        config = self.config
        if config.pos_encodings == "rope":
            return [torch.arange(config.prefix_len + config.seq_len)]
        cells, columns = torch.arange(config.seq_len), config.grid_shape[1]
        return [F.pad(part, (config.prefix_len, 0)) for part in (cells // columns, cells % columns)]

    def rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [1, T, 1, head_dim] each, in float32."""
        config = self.config
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                head_dim=config.head_dim // config.rotary_parts,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )
        tables = [rotary(torch.empty(0), ids.unsqueeze(0)) for ids in self.coordinates()]
        cos, sin = (torch.cat(parts, dim=-1).unsqueeze(2) for parts in zip(*tables))
        return cos, sin

    def forward(
        self, input_ids: torch.Tensor, puzzle_rows: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return x [B, T, D] in `dtype`, and the float32 cos and sin tables [1, T, 1, head_dim] or None."""
        config = self.config
        self.validate_length(input_ids)
        x = self.tokens(input_ids).to(dtype)
        if puzzle_rows is not None:
            rows = F.pad(puzzle_rows.to(dtype), (0, config.prefix_len * config.hidden_size - config.puzzle_emb_ndim))
            x = torch.cat((rows.view(-1, config.prefix_len, config.hidden_size), x), dim=1)
        if config.pos_encodings == "learned":
            # Do not read the weight directly: accelerate loads offloaded weights only when their module is called.
            positions = self.positions(torch.arange(x.shape[1], device=x.device))
            x = math.sqrt(0.5) * (x + positions.to(dtype))  # gives the sum the variance of one embedding
        return math.sqrt(config.hidden_size) * x, self.rotary()

    def rotary(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the cos and sin tables for attention, or None without rotary positions."""
        return (self.cos, self.sin) if self.config.rotary_parts else None

    def validate_length(self, input_ids: torch.Tensor) -> None:
        """Raise ValueError unless `input_ids` contains valid tokens of shape [batch, seq_len]."""
        if input_ids.dim() != 2 or input_ids.shape[1] != self.config.seq_len:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}: must be [batch, {self.config.seq_len}]")
        validate_ids(input_ids, self.config.vocab_size)


# Cheap alternatives to attention over board positions (`SeRrmPuzzleConfig.mixing`). Each maps states [N, S, D] to a
# residual that is added to the states. `PositionSwiGLU` is TRM's mlp_t; the other mixers are ours.


TINY = 1e-30  # minimum total weight, to avoid dividing by 0 for cells that no unit contains


def grid_units(grid_shape: list[int], box_shape: list[int]) -> dict[str, list[list[int]]]:
    """Return the cells of each row, column and box of a board."""
    (rows, columns), (box_rows, box_columns) = grid_shape, box_shape
    lines = [[row * columns + column for column in range(columns)] for row in range(rows)]
    boxes = [
        [cell for line in lines[row : row + box_rows] for cell in line[column : column + box_columns]]
        for row in range(0, rows, box_rows)
        for column in range(0, columns, box_columns)
    ]
    return {"row": lines, "column": [list(line) for line in zip(*lines)], "box": boxes}


class UnitMeans(nn.Module):
    """Linear maps of the means over each cell's units: its row, column and box, or `config.units`.

    `members` [units, S] is 1 where a cell belongs to a unit. Matrix products with it compute the means and copy them
    back to the cells. On a CPU, this is four times faster than means over the axes of the board. With `weights`, the
    means are weighted (softmax pooling).
    """

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__()
        units = config.units or grid_units(config.grid_shape, config.box_shape)
        # config.json sorts its keys, so the order of the pooling scores must not depend on the order of the units
        first = {"row": 0, "column": 1, "box": 2}
        self.units = {kind: units[kind] for kind in sorted(units, key=lambda kind: (first.get(kind, 3), kind))}
        self.counts = [len(cells) for cells in self.units.values()]
        for kind in self.units:
            self.add_module(kind, linear_class(config)(config.hidden_size, config.hidden_size, bias=False))
        self.members = nn.Buffer(torch.empty(sum(self.counts), config.seq_len), persistent=False)

    def member_table(self) -> torch.Tensor:
        """Return a float32 table [units, S], 1 where a cell belongs to a unit."""
        table = torch.zeros(self.members.shape)
        for row, cells in zip(table, (cells for kind in self.units.values() for cells in kind)):
            row[cells] = 1
        return table

    def forward(self, hidden_states: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Mix hidden_states [N, S, D]. `weights` [N, S, kinds, heads] weight the cells in each unit's mean."""
        members = self.members.to(hidden_states.dtype)
        if weights is None:
            means = ((members / members.sum(1, keepdim=True)) @ hidden_states).split(self.counts, dim=1)
        else:
            means = [
                part.to(hidden_states.dtype)
                @ scaled_heads(hidden_states, weight / (part.T @ (part @ weight)).clamp_min(TINY))
                for part, weight in zip(self.members.to(weights.dtype).split(self.counts), weights.unbind(2))
            ]
        parts = zip((getattr(self, kind) for kind in self.units), means)
        return members.T @ torch.cat([linear(part) for linear, part in parts], dim=1)


def scaled_heads(hidden_states: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply each head of hidden_states [..., D] by its factor [..., heads], in the dtype of hidden_states."""
    heads = hidden_states.unflatten(-1, (factors.shape[-1], -1))
    return (heads * factors.to(hidden_states.dtype).unsqueeze(-1)).flatten(-2)


class Neighbours(nn.Module):
    """Linear map of the cells above, below, left and right. Cells beyond the border are zero."""

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__()
        self.grid_shape = config.grid_shape
        self.linear = linear_class(config)(4 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = F.pad(hidden_states.unflatten(1, self.grid_shape), (0, 0, 1, 1, 1, 1))
        around = (wide[:, :-2, 1:-1], wide[:, 2:, 1:-1], wide[:, 1:-1, :-2], wide[:, 1:-1, 2:])
        return self.linear(torch.cat(around, dim=-1).flatten(1, 2))


class PositionSwiGLU(SwiGLU):
    """SwiGLU over the position axis."""

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__(config.seq_len, config, config.position_intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.transpose(1, 2)).transpose(1, 2)


class LineSwiGLUs(nn.Module):
    """SwiGLUs over all states of a row, and of a column, which therefore read the order of a line's cells.

    All rows share weights, and so do all columns. States are divided by the number of cells of the line: without that,
    the learning rate that suits the other layers is too large for this one.
    """

    def __init__(self, config: HrmPuzzleConfig):
        super().__init__()
        rows, columns = self.grid_shape = config.grid_shape
        self.row = SwiGLU(columns * config.hidden_size, config, config.position_intermediate_size)
        self.column = SwiGLU(rows * config.hidden_size, config, config.position_intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        grid = hidden_states.unflatten(1, self.grid_shape)
        turned = grid.transpose(1, 2)
        by_row = self.row(grid.flatten(2) / grid.shape[2]).view_as(grid)
        by_column = self.column(turned.flatten(2) / turned.shape[2]).view(turned.shape).transpose(1, 2)
        return (by_row + by_column).flatten(1, 2)


MIXERS = {"mlp_t": PositionSwiGLU, "units": UnitMeans, "neighbours": Neighbours, "lines": LineSwiGLUs}
