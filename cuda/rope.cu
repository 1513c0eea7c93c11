// Rotary embedding of the query and key heads of a packed (rows, HEADS * HD) tensor, forward (SIGN 1) or back (SIGN -1):
// with halves x1, x2 of a head, out1 = x1 cos - x2 sin and out2 = x2 cos + x1 sin; value heads are copied.
//
// A lane owns N channels of the first half of a head and the N that they pair with, of TOGETHER heads side by side; LANES of
// them stand side by side, and SLOTS rows one below the other, so column sums for the bias gradient stay in registers until a
// block has gone through its 256 rows, and out may be the memory of x. Backward is the turn by -angle.
//
// Where sums or the transposed form are wanted a lane has 4 channels of two heads: the angles of a row of lanes are one run,
// read once for both heads, and rows of the tile are written from shared memory in runs of 128 bytes.
//
// Measured on an H200 in bf16 (0.5B, 7B): forward 94 and 98% of a copy, backward with sums 85 and 89%, with fp8 and sums 72
// and 76% (8 channels of one head: 69 and 69%; 4 of two, rows stored as computed: 64 and 64%).
//
// Architectures: 80 86 89 90 100 120
// Constants: T, HEADS (all), TURNED (query and key heads), HD, N, LANES, TOGETHER, SIGN, IN_PLACE (value heads are there
// already), FORMS, E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int HALF = HD / 2, PER_HEAD = HALF / N, WIDTH = HEADS * HD;
constexpr int UNITS = ((IN_PLACE ? TURNED : HEADS) + TOGETHER - 1) / TOGETHER * PER_HEAD;  // of N channels, in a row
constexpr int ACROSS = (UNITS + LANES - 1) / LANES, SLOTS = TILE_THREADS / LANES;
constexpr int AT_ONCE = TOGETHER == 1 ? 4 : 2, TURN = AT_ONCE * SLOTS;  // rows of a thread, and of the block, at a time
constexpr int TILE = (FORMS & COL) ? 128 : TURN, BLOCK_ROWS = (FORMS & SUMS) ? SUMS_ROWS : TILE;
constexpr int SPAN = LANES * N, PITCH = tile_pitch(2 * TOGETHER * SPAN);
// 16 bytes of the tile belong together in a row, which then is written from there: a lane has 4
constexpr bool ROW_LATER = (FORMS & COL) && (FORMS & ROW) && HALF % 16 == 0 && SPAN % 16 == 0;
static_assert(HALF % N == 0 && TILE % TURN == 0, "an access stays within half a head");
static_assert(!(FORMS & COL) || N >= 4, "the four columns that write_columns takes together lie within half a head");

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
    __shared__ __align__(16) u8 tile[(FORMS & COL) ? TILE * PITCH : 4];
    __shared__ __align__(16) float shared[(FORMS & SUMS) ? TILE_WARPS * SPAN : 4];
    __shared__ int known[BLOCK_ROWS > TURN ? BLOCK_ROWS : 1];  // positions: angles do not wait for two loads
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES, first_unit = blockIdx.x % ACROSS * LANES;
    int unit = first_unit + lane, head = unit / PER_HEAD * TOGETHER, channel = unit % PER_HEAD * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * BLOCK_ROWS, begin = block_row * WIDTH + head * HD + channel;
    int block_rows = static_cast<int>(min(rows - block_row, static_cast<i64>(BLOCK_ROWS)));
    Sink<T, FORMS, E4M3, ROW_LATER> sink(OUTPUT(T, out));
    sink.begin_at(begin);
    const T* block_x = x + block_row * WIDTH;
    x += begin, table += channel, positions += block_row;
    auto exists = [=](int t) { return unit < UNITS && (TOGETHER == 1 || head + t < (IN_PLACE ? TURNED : HEADS)); };
    // L2 is asked for the rows after those that are being read: backward with sums goes from 82 and 86 to 85 and 89% of a
    // copy, with a tile to write as well from 72 and 76 to 67 and 73%
    constexpr bool EXPECTS = SIGN < 0 && (FORMS & SUMS) && !(FORMS & COL);
    auto expect = [&](int first_row) {
        constexpr int LINE = 128 / sizeof(T), LINES = (2 * TOGETHER * SPAN + LINE - 1) / LINE;
        int left = first_unit / PER_HEAD * TOGETHER * HD;
        for (int task = threadIdx.x; task < TURN * LINES; task += TILE_THREADS) {
            int row = first_row + task / LINES, at = left + task % LINES * LINE;
            if (row < block_rows && at < WIDTH) expect_line(block_x + row * WIDTH + at);
        }
    };
    Pack<T, N> read[AT_ONCE][TOGETHER][2];
    int position[AT_ONCE];
    auto begin_reading = [&](int first_row) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int row = first_row + slot + i * SLOTS;
#pragma unroll
            for (int t = 0; t < TOGETHER; t++) {
                if (row >= block_rows || !exists(t)) continue;
                read[i][t][0].load(x + row * WIDTH + t * HD);
                read[i][t][1].load(x + row * WIDTH + t * HD + HALF);
                if (BLOCK_ROWS == TURN) position[i] = positions[row];
            }
        }
    };
    begin_reading(0);
    if constexpr (EXPECTS) expect(TURN);
    if constexpr (BLOCK_ROWS > TURN) {
        for (int i = threadIdx.x; i < block_rows; i += TILE_THREADS) known[i] = positions[i];
        __syncthreads();
    }
    float sums[TOGETHER][2][N] = {};
#pragma unroll 1
    for (int first_row = 0; first_row < (block_rows + TILE - 1) / TILE * TILE; first_row += TURN) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int row = first_row + slot + i * SLOTS;
            if (row >= block_rows || !exists(0)) continue;
            const float* angles = table + static_cast<i64>(BLOCK_ROWS > TURN ? known[row] : position[i]) * HD;
            float c[N], s[N];
            if (head < TURNED) load(angles, c), load(angles + HALF, s);
#pragma unroll
            for (int t = 0; t < TOGETHER; t++) {
                if (!exists(t)) continue;
                float a[N], b[N];
                read[i][t][0].get(a);
                read[i][t][1].get(b);
                if (head + t < TURNED) {
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        float x1 = a[j], x2 = b[j], turn = SIGN * s[j];
                        a[j] = x1 * c[j] - x2 * turn;
                        b[j] = x2 * c[j] + x1 * turn;
                    }
                }
                int in_tile = row % TILE, at = row * WIDTH + t * HD, place = 2 * t * SPAN + lane * N;
                sink.put(at, a, tile + tile_at<TILE>(in_tile, place, PITCH));
                sink.put(at + HALF, b, tile + tile_at<TILE>(in_tile, place + SPAN, PITCH));
                if constexpr ((FORMS & SUMS) != 0) {
#pragma unroll
                    for (int j = 0; j < N; j++) sums[t][0][j] += a[j], sums[t][1][j] += b[j];
                }
            }
        }
        bool full = (FORMS & COL) && (first_row + TURN) % TILE == 0;
        if (full) __syncthreads();
        if (first_row + TURN < block_rows) begin_reading(first_row + TURN);  // on its way while the tile is written
        if constexpr (EXPECTS) expect(first_row + 2 * TURN);
        if constexpr ((FORMS & COL) != 0) {
            if (!full) continue;
            auto place = [=](int c) {
                int at = first_unit + c % SPAN / N, of_head = at / PER_HEAD * TOGETHER + c / SPAN / 2;
                bool there = at < UNITS && of_head < HEADS;
                return there ? of_head * HD + at % PER_HEAD * N + c % N + c / SPAN % 2 * HALF : -1;
            };
            i64 tile_row = block_row + first_row + TURN - TILE;
            write_columns<TILE, TILE_THREADS>(tile, PITCH, out_col, 2 * TOGETHER * SPAN, place, tile_row, rows);
            if constexpr (ROW_LATER)
                write_rows<TILE, TILE_THREADS>(tile, PITCH, out_row + tile_row * WIDTH, 2 * TOGETHER * SPAN, WIDTH, place,
                                               static_cast<int>(min(rows - tile_row, static_cast<i64>(TILE))));
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0) {
#pragma unroll
        for (int part = 0; part < 2 * TOGETHER; part++) {
            auto place = [=](int c) {
                int at = first_unit + c / N, of_head = at / PER_HEAD * TOGETHER + part / 2;
                bool there = at < UNITS && of_head < HEADS;
                return there ? of_head * HD + at % PER_HEAD * N + c % N + part % 2 * HALF : WIDTH;
            };
            store_sums<LANES>(sums[part / 2][part % 2], out_sums + block_row / SUMS_ROWS * WIDTH, WIDTH, place, shared);
        }
    }
    sink.finish();
}
