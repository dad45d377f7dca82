"""How one sparse MLA decode is divided over programs, and what it takes of its workspace: arithmetic alone, no device."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_specverify.kernels import checks

#: Values of a row.
DIM = 512
#: Programs among which keys are divided: at least those of any supported device that runs one on each multiprocessor.
MAX_PROGRAMS = 256
#: Parts of one tile of rows: each writes 131 KB and is read again, more than its keys are.
MAX_SPLITS = 64
#: Rows of the largest tile.
MAX_ROWS = 64
#: Bytes of one row of one part: 512 values and an LSE in FP32.
_ROW_BYTES = 4 * (DIM + 1)


@dataclass(frozen=True)
class Costs:
    """Microseconds of one call's pieces on one architecture, with one `SparseConfig`; see `microseconds`.

    Attributes:
        start: what one wave of programs takes beside its tiles.
        tile: a tile of keys.
        combine: the reducer, at the least.
        part: each part of a tile of rows that is written and read again.
        rows: each tile of rows that the reducer writes.
        packed_start, packed_tile: what a program with several tokens' rows takes besides, and by which factor longer its tiles
            take: which row sees which key is worked out for each of them.
    """

    start: float
    tile: float
    combine: float
    part: float
    rows: float
    packed_start: float = 0.0
    packed_tile: float = 1.0


@dataclass(frozen=True)
class SparseConfig:
    """How the decode kernel and its reducer are launched on one architecture.

    Attributes:
        rows: query rows of the smallest tile; the largest is `MAX_ROWS`. Hopper's matrix instructions take 64.
        keys: list entries of a tile.
        num_warps, num_stages: of the decode kernel.
        value_parts: programs among which the 512 output columns are divided, each of which computes all scores: 1, 2, 4 or 8.
        pdl: start the reducer, and this kernel after the one before it, early (programmatic dependent launch).
        specialized: Hopper's kernel with specialised warps, where the call is one that it serves; it takes 64 keys a tile, or 32.
        registers: of a thread of its second consumer and of its producers.
        reduce_rows, reduce_columns, reduce_warps: tile of the reducer.
        costs: decide how many parts the keys have; None for as many as there is room for.
    """

    rows: int = 64
    keys: int = 32
    num_warps: int = 8
    num_stages: int = 2
    value_parts: int = 1
    pdl: bool = False
    specialized: bool = False
    registers: tuple[int, int] = (160, 80)
    reduce_rows: int = 1
    reduce_columns: int = 512
    reduce_warps: int = 4
    costs: Costs | None = None


@dataclass(frozen=True)
class Division:
    """Programs of one call.

    Attributes:
        block_m: rows of a tile.
        tokens: query rows (draft tokens) of one request in a tile, each with `block_m // tokens` places for heads.
        head_blocks: tiles that the heads of a token need.
        blocks: tiles of a request.
        tiles: of keys, of one tile of rows.
        splits: parts of the keys.
    """

    block_m: int
    tokens: int
    head_blocks: int
    blocks: int
    tiles: int
    splits: int


def divide(
    batch: int, queries: int, heads: int, window: int, topk: int, config: SparseConfig, programs: int,
    *, packed: bool, shared_main: bool, splits: int | None = None,
) -> Division:  # fmt: skip
    """The division of a call with these sizes over `programs` programs that run at once.

    Args:
        window, topk: width of the window's lists and of the main lists.
        packed: whether rows of one request share their window's list, so that several of them may share a tile.
        shared_main: whether they share the main list too; lists of their own are read one after the other.
        splits: asked for; None for as many as `programs` has room for.
    """
    tokens = 1
    if packed:
        # Several draft tokens where one's heads leave room, but no more places than there are tokens.
        tokens = min(max(MAX_ROWS // heads, 1), _power_of_two(queries))
    block_m = min(max(heads * tokens, config.rows), MAX_ROWS)
    head_blocks = max(heads * tokens // block_m, 1)
    blocks = -(-queries // tokens) * head_blocks
    tiles = -(-window // config.keys) + (1 if shared_main else tokens) * -(-topk // config.keys)
    if splits is None:
        splits = parts_of(batch * blocks, tiles, programs, config)
    return Division(block_m, tokens, head_blocks, blocks, tiles, splits)


def parts_of(rows: int, tiles: int, programs: int, config: SparseConfig) -> int:
    """Parts of `tiles` tiles of keys for each of `rows` tiles of rows: those that cost least, the fewest of those."""
    room = min(programs, MAX_PROGRAMS) // max(rows * config.value_parts, 1)
    most = max(min(tiles, MAX_SPLITS, room), 1)
    if config.costs is None:
        # As few as have the longest part as short: fewer parts to write and to read.
        longest = -(-tiles // most)
        return max(-(-tiles // longest), 1) if longest else 1
    costs = config.costs
    return min(range(1, most + 1), key=lambda splits: microseconds(rows, tiles, splits, programs, costs))


def microseconds(rows: int, tiles: int, splits: int, programs: int, costs: Costs, *, packed: bool = False) -> float:
    """What a call is expected to take: waves of programs, each with the tiles of its part, and the reducer behind them.

    Args:
        rows, tiles: tiles of rows of all requests, and tiles of keys of each.
        packed: whether a tile holds rows of several tokens.
    """
    waves = -(-rows * splits // programs)
    start, tile = (costs.start + costs.packed_start, costs.tile * costs.packed_tile) if packed else (costs.start, costs.tile)
    once = waves * (start + tile * -(-tiles // splits))
    return once + (costs.combine + costs.part * rows * splits + costs.rows * rows if splits > 1 else 0.0)


def workspace_bytes(batch: int, division: Division) -> int:
    """What this call needs: nothing where its keys are not divided."""
    return 0 if division.splits == 1 else batch * division.blocks * division.splits * division.block_m * _ROW_BYTES


def deepseek_v41_decode_workspace_size(
    batch: int, topk: int, *, queries: int = 1, heads: int = 64, window: int = 128, splits: int | None = None
) -> int:
    """Bytes of workspace that serve `deepseek_v41_decode` at these sizes and at all smaller ones, on every device.

    Pure arithmetic, never less for a larger argument. A call whose keys are divided has as many parts as fit `MAX_PROGRAMS`
    programs, so that no more tiles of rows than that are ever written.

    Args:
        batch, queries, heads: of q [batch, queries, heads, 512].
        topk, window: widths of the main lists and of the window's.
        splits: the most that calls ask for by name; None if they leave it to the division.

    Raises:
        ArgumentError: a size below 0, or below 1 for all but batch, topk and window.
    """
    checks.integer("batch", batch, 0)
    checks.integer("topk", topk, 0)
    checks.integer("queries", queries, 1)
    checks.integer("heads", heads, 1)
    checks.integer("window", window, 0)
    if splits is not None:
        checks.integer("splits", splits, 1)
    units = batch * queries * -(-heads // MAX_ROWS)
    # The smallest tile of keys has 16; packed rows read the lists of up to 8 tokens, one after the other.
    tiles = -(-window // 16) + min(queries, 8) * -(-topk // 16)
    written = min(MAX_PROGRAMS, units * min(tiles, MAX_SPLITS))
    if splits is not None:
        written = max(written, units * splits)
    return written * MAX_ROWS * _ROW_BYTES


def _power_of_two(number: int) -> int:
    """The smallest one that is `number` or more."""
    return 1 << (number - 1).bit_length()
