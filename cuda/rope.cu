// Rotary embedding of the query and key heads of a packed (rows, HEADS * HD) tensor, forward (SIGN 1) or back (SIGN -1):
// with halves x1, x2 of a head, out1 = x1 cos - x2 sin and out2 = x2 cos + x1 sin; value heads are copied.
//
// A lane owns N channels of the first half of a head and the N that they pair with, of TOGETHER heads side by side; LANES of
// them stand side by side, and SLOTS pairs of rows one below the other, so column sums for the bias gradient stay in
// registers until a block has gone through its 256 rows, and out may be the memory of x. Backward is the turn by -angle.
//
// Where sums or the transposed form are wanted a lane has 4 channels of two heads, or 2 where half a head is no multiple of 4:
// the angles of a row of lanes are one run, read once for both heads, ahead as the rows are.
//
// Measured on an H200 in bf16 (0.5B, 7B): forward 94 and 98% of a copy, backward with sums 88 and 92%, with fp8 and sums 80
// and 85% (tiles of 64 rows 76 and 78%, two blocks to a multiprocessor 65 and 70%, rows by way of the tile 79 and 83%).
//
// Architectures: 80 86 89 90 100 120
// Constants: T, HEADS (all), TURNED (query and key heads), HD, N, LANES, TOGETHER, SIGN, IN_PLACE (value heads are there
// already), FORMS, E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int HALF = HD / 2, PER_HEAD = HALF / N, WIDTH = HEADS * HD, PRESENT = IN_PLACE ? TURNED : HEADS;
constexpr int UNITS = (PRESENT + TOGETHER - 1) / TOGETHER * PER_HEAD;  // of N channels, in a row
constexpr int ACROSS = (UNITS + LANES - 1) / LANES, SLOTS = TILE_THREADS / LANES;
constexpr int PAIRS = TOGETHER == 1 ? 2 : 1, TURN = 2 * PAIRS * SLOTS;  // of rows of a thread, and rows of the block, at a time
constexpr int SPAN = LANES * N, COLUMNS = 2 * TOGETHER * SPAN;
constexpr int TILE = (FORMS & COL) ? 128 : TURN, BLOCK_ROWS = (FORMS & SUMS) ? SUMS_ROWS : TILE;
constexpr int PITCH = pair_pitch(COLUMNS);
constexpr bool LISTED = BLOCK_ROWS > TURN;  // positions of the block's rows: angles are read with the rows, ahead
static_assert(HALF % N == 0 && TILE % TURN == 0, "an access stays within half a head");

// Blocks to a multiprocessor: with 2, backward with sums was at 73% of a copy and not 83%. But 80 registers are too few for
// the value, both fp8 forms and sums at once, and for what the compiler makes of any of it for other cards.
#if __CUDA_ARCH__ == 900
constexpr int RESIDENT = sizeof(T) == 4 || ((FORMS & VALUE) && (FORMS & COL) && (FORMS & SUMS)) ? 2 : 3;
#else
constexpr int RESIDENT = 2;
#endif

extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT)
    rope(OUTPUT_PARAMETERS(T, out), const T* x, const float* table, const int* positions, i64 rows) {
    // halves of the first heads, then of the second ones
    __shared__ __align__(128) u8 tile[pair_bytes(TILE, COLUMNS)];
    __shared__ __align__(16) float shared[(FORMS & SUMS) ? TILE_WARPS * COLUMNS : 4];
    __shared__ int known[LISTED ? BLOCK_ROWS : 1];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES, first_unit = blockIdx.x % ACROSS * LANES;
    int unit = first_unit + lane, head = unit / PER_HEAD * TOGETHER, channel = unit % PER_HEAD * N;
    int first_column = first_unit / PER_HEAD * TOGETHER * HD;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * BLOCK_ROWS, begin = block_row * WIDTH + head * HD + channel;
    int block_rows = static_cast<int>(min(rows - block_row, static_cast<i64>(BLOCK_ROWS)));
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, out));
    sink.begin_at(begin);
    const T* block_x = x + block_row * WIDTH;
    x += begin, table += channel, positions += block_row;
    auto exists = [=](int t) {
        return (UNITS % LANES == 0 || unit < UNITS) && (PRESENT % TOGETHER == 0 || head + t < PRESENT);
    };
    auto turned = [=](int t) { return (TURNED % TOGETHER == 0 ? head : head + t) < TURNED; };
    // the output's column of one of a tile's
    auto place = [=](int c) {
        if (LANES == PER_HEAD) return PRESENT % TOGETHER == 0 || first_column + c < WIDTH ? first_column + c : -1;
        int at = first_unit + c % SPAN / N, of_head = at / PER_HEAD * TOGETHER + c / SPAN / 2;
        bool there = at < UNITS && of_head < HEADS;
        return there ? of_head * HD + at % PER_HEAD * N + c % N + c / SPAN % 2 * HALF : -1;
    };
    // L2 is asked for the rows after those that are being read. Before angles were read ahead, backward with sums went from 82
    // and 86 to 85 and 89% of a copy by that, with a tile to write as well from 72 and 76 to 67 and 73%.
    constexpr bool EXPECTS = SIGN < 0 && (FORMS & SUMS) && !(FORMS & COL);
    auto expect = [&](int first_row) {
        constexpr int LINE = 128 / sizeof(T), LINES = (COLUMNS + LINE - 1) / LINE;
        for (int task = threadIdx.x; task < TURN * LINES; task += TILE_THREADS) {
            int row = first_row + task / LINES, at = first_column + task % LINES * LINE;
            if (row < block_rows && at < WIDTH) expect_line(block_x + row * WIDTH + at);
        }
    };
    Pack<T, N> read[PAIRS][2][TOGETHER][2];
    float cosines[LISTED ? PAIRS : 1][2][N], sines[LISTED ? PAIRS : 1][2][N];
    int position[PAIRS][2];
    auto begin_reading = [&](int first_row) {
        int first = first_row + 2 * slot;
        const T* from = x + first * WIDTH;
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) {
            int row = i / 2 * 2 * SLOTS + i % 2;
#pragma unroll
            for (int t = 0; t < TOGETHER; t++) {
                if (row >= block_rows - first || !exists(t)) continue;
                read[i / 2][i % 2][t][0].load(from + row * WIDTH + t * HD);
                read[i / 2][i % 2][t][1].load(from + row * WIDTH + t * HD + HALF);
                if (!LISTED) position[i / 2][i % 2] = positions[first + row];
            }
        }
    };
    auto begin_turning = [&](int first_row) {
        if constexpr (LISTED) {
            if (!turned(0)) return;
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; i++) {
                int row = first_row + 2 * slot + i / 2 * 2 * SLOTS + i % 2;
                const float* angles = table + static_cast<i64>(known[row]) * HD;
                load(angles, cosines[i / 2][i % 2]), load(angles + HALF, sines[i / 2][i % 2]);
            }
        }
    };
    begin_reading(0);
    if constexpr (EXPECTS) expect(TURN);
    if constexpr (LISTED) {
        for (int i = threadIdx.x; i < BLOCK_ROWS; i += TILE_THREADS) known[i] = i < block_rows ? positions[i] : 0;
        __syncthreads();
    }
    begin_turning(0);
    float sums[2 * TOGETHER * N] = {};
#pragma unroll 1
    for (int first_row = 0; first_row < (block_rows + TILE - 1) / TILE * TILE; first_row += TURN) {
        int first = first_row + 2 * slot;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int left = block_rows - first - 2 * i * SLOTS, pair = first_row % TILE / 2 + slot + i * SLOTS;
#pragma unroll
            for (int t = 0; t < TOGETHER; t++) {
                u32 bytes[2][2][(N + 3) / 4] = {};  // of halves and rows
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    if (odd >= left || !exists(t)) continue;
                    float(&c)[N] = cosines[LISTED ? i : 0][LISTED ? odd : 0], (&s)[N] = sines[LISTED ? i : 0][LISTED ? odd : 0];
                    if (!LISTED && turned(t)) {
                        const float* angles = table + static_cast<i64>(position[i][odd]) * HD;
                        load(angles, c), load(angles + HALF, s);
                    }
                    float a[N], b[N];
                    read[i][odd][t][0].get(a);
                    read[i][odd][t][1].get(b);
                    if (turned(t)) {
#pragma unroll
                        for (int j = 0; j < N; j++) {
                            float x1 = a[j], x2 = b[j], turn = SIGN * s[j];
                            a[j] = x1 * c[j] - x2 * turn;
                            b[j] = x2 * c[j] + x1 * turn;
                        }
                    }
                    int at = (first + 2 * i * SLOTS + odd) * WIDTH + t * HD;
                    sink.put(at, a, bytes[0][odd]);
                    sink.put(at + HALF, b, bytes[1][odd]);
                    if constexpr ((FORMS & SUMS) != 0) {
#pragma unroll
                        for (int j = 0; j < N; j++) sums[2 * t * N + j] += a[j], sums[(2 * t + 1) * N + j] += b[j];
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
                    store_pair<N>(tile + pair_at(pair, (2 * t + half) * SPAN + lane * N, PITCH), bytes[half][0], bytes[half][1]);
            }
        }
        bool full = (FORMS & COL) && (first_row + TURN) % TILE == 0;
        if (full) __syncthreads();
        if (first_row + TURN < block_rows) {  // on its way while the tile is written
            begin_reading(first_row + TURN);
            begin_turning(first_row + TURN);
        }
        if constexpr (EXPECTS) expect(first_row + 2 * TURN);
        if constexpr ((FORMS & COL) != 0) {
            if (!full) continue;
            i64 tile_row = block_row + first_row + TURN - TILE;
            write_transposed<TILE, TILE_THREADS>(tile, PITCH, out_col, COLUMNS, place, tile_row, rows);
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0)
        store_sums<LANES, N>(sums, out_sums + block_row / SUMS_ROWS * WIDTH, place, shared);
    sink.finish();
}
