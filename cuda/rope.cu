// Rotary embedding of the query and key heads of a packed (rows, HEADS * HD) tensor, forward (SIGN 1) or back (SIGN -1):
// with halves x1, x2 of a head, out1 = x1 cos - x2 sin and out2 = x2 cos + x1 sin; value heads are copied.
//
// A lane owns N channels of the first half of one head and the N that they pair with; LANES of them stand side by side, and
// SLOTS rows one below the other, so column sums for the bias gradient stay in registers until a block has gone through
// its 256 rows, and out may be the memory of x. Backward is the turn by -angle. Where sums are wanted LANES is 8: with 32
// there are so few blocks of 256 rows that the last wave stands half empty (measured, 0.5B: 65% of a copy against 79%).
//
// Measured on an H200 in bf16 (0.5B, 7B): forward 94 and 98% of a copy, backward with sums 79 and 87%.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, HEADS (all), TURNED (query and key heads), HD, N, LANES, SIGN, IN_PLACE (value heads are there already),
// FORMS, E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int HALF = HD / 2, PER_HEAD = HALF / N;              // pairs of accesses in a head
constexpr int PAIRS = (IN_PLACE ? TURNED : HEADS) * PER_HEAD;  // in a row
constexpr int ACROSS = (PAIRS + LANES - 1) / LANES, WIDTH = HEADS * HD;
constexpr int SLOTS = TILE_THREADS / LANES, TILE = (FORMS & COL) ? TILE_ROWS : 4 * SLOTS;
constexpr int AT_ONCE = TILE / SLOTS < 4 ? TILE / SLOTS : 4, BLOCK_ROWS = (FORMS & SUMS) ? SUMS_ROWS : TILE;
constexpr int SPAN = LANES * N, PITCH = tile_pitch(SPAN);
constexpr int TILE_BYTES = (FORMS & COL) ? TILE * PITCH : 4;
constexpr int SUMS_FLOATS = (FORMS & SUMS) ? TILE_WARPS * 2 * SPAN : 4;
static_assert(HALF % N == 0 && TILE % (SLOTS * AT_ONCE) == 0, "an access stays within half a head");

// column of a pair's first channel
__device__ __forceinline__ int column_of(int pair) { return pair / PER_HEAD * HD + pair % PER_HEAD * N; }

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    rope(OUTPUT_PARAMETERS(T, out), const T* x, const float* table, const int* positions, i64 rows) {
    __shared__ __align__(16) u8 tiles[2][TILE_BYTES];
    __shared__ __align__(16) float shared[SUMS_FLOATS];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    int first_pair = blockIdx.x % ACROSS * LANES, pair = first_pair + lane, column = column_of(pair);
    bool turned = pair < TURNED * PER_HEAD;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * BLOCK_ROWS;
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, out));
    float sums[2][N] = {};
    for (i64 first_row = block_row; first_row < min(rows, block_row + BLOCK_ROWS); first_row += TILE) {
#pragma unroll 1
        for (int part = slot; part < TILE; part += AT_ONCE * SLOTS) {
            Pack<T, N> first[AT_ONCE], second[AT_ONCE];
            int position[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                i64 row = first_row + part + i * SLOTS;
                if (row < rows && pair < PAIRS) {
                    first[i].load(x + row * WIDTH + column);
                    second[i].load(x + row * WIDTH + column + HALF);
                    position[i] = positions[row];
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                int in_tile = part + i * SLOTS;
                i64 row = first_row + in_tile;
                if (row >= rows || pair >= PAIRS) continue;
                float a[N], b[N];
                first[i].get(a);
                second[i].get(b);
                if (turned) {
                    const float* angles = table + static_cast<i64>(position[i]) * HD + pair % PER_HEAD * N;
                    float c[N], s[N];
                    load(angles, c);
                    load(angles + HALF, s);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        float x1 = a[j], x2 = b[j], turn = SIGN * s[j];
                        a[j] = x1 * c[j] - x2 * turn;
                        b[j] = x2 * c[j] + x1 * turn;
                    }
                }
                sink.put(row * WIDTH + column, a, tiles[0] + in_tile * PITCH + lane * N);
                sink.put(row * WIDTH + column + HALF, b, tiles[1] + in_tile * PITCH + lane * N);
#pragma unroll
                for (int j = 0; j < N; j++) sums[0][j] += a[j], sums[1][j] += b[j];
            }
        }
        if constexpr ((FORMS & COL) != 0) {
            __syncthreads();
            int columns = min(LANES, PAIRS - first_pair) * N;
            for (int half = 0; half < 2; half++)
                write_columns<TILE, TILE_THREADS>(
                    tiles[half], PITCH, out_col, columns,
                    [=](int c) { return column_of(first_pair + c / N) + c % N + half * HALF; }, first_row, rows);
            __syncthreads();
        }
    }
    if constexpr ((FORMS & SUMS) != 0) {
        // rows of a warp first, then the warps in order
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int step = 16; step >= LANES; step /= 2)
                    sums[half][j] += __shfl_xor_sync(0xffffffffu, sums[half][j], step);
            if (threadIdx.x % 32 < LANES) store(shared + (threadIdx.x / 32 * 2 + half) * SPAN + lane * N, sums[half]);
        }
        __syncthreads();
        for (int c = threadIdx.x; c < 2 * SPAN; c += TILE_THREADS) {
            int owner = first_pair + c % SPAN / N;
            if (owner >= PAIRS) continue;
            float total = 0;
#pragma unroll
            for (int w = 0; w < TILE_WARPS; w++) total += shared[w * 2 * SPAN + c];
            out_sums[block_row / SUMS_ROWS * WIDTH + column_of(owner) + c % N + c / SPAN * HALF] = total;
        }
    }
    sink.finish();
}
