// The update: SGD with momentum in one pass over master, momentum and gradient; as in optimizer.cu, which says more of it.
//
// A lane owns N elements at a time and reads its next ones while it computes. Without a transposed form parameters are seen
// as rows of 32 * N, which as many blocks as run at once take in turns; with one, and where blocks of 128 numbers end with
// the rows, a block owns a tile of 64 rows. Every operation is rounded by itself, in the order of the reference. Not
// measured yet.
//
// Architectures: 80 86 89 90 100 120
// Constants: MASTER, M, G, T (dtypes of master, momentum, gradient, weight), C (columns; 32 * N where not TILED), N, TILED
// (1 where blocks own tiles), RESIDENT (blocks to a multiprocessor, at least), FORMS, E4M3, MOMENTUM (1 if there is any),
// NESTEROV

#include "common.cuh"
#include "eight_bits.cuh"
#include "constants"
#include "forms.cuh"
#include "random.cuh"
#include "update.cuh"

constexpr int LANES = TILE_LANES<N>, SLOTS = TILE_SLOTS<N>, SPAN = LANES * N, ACROSS = (C + SPAN - 1) / SPAN;
constexpr int ROWS = tile_rows(64), PITCH = pair_pitch(SPAN);
constexpr bool IN_BLOCKS = (MOMENTUM && IS_CODED<M>) || IS_CODED<MASTER>;
static_assert(!IN_BLOCKS || SPAN % BLOCK == 0, "a block lies in one row of lanes");
static_assert(!IS_CODED<MASTER> || FORMS == 0, "copies of a weight in 8 bits are made of it");
static_assert(N == 4 || N == 8, "a Philox block makes the bits of 4 elements' momentum, or of 8 elements' masters");

struct State {
    Moment<MASTER, N> master;
    Moment<M, N> m;
    Pack<G, N> grad;
};

// Element i has the random bits of element origin + i, a multiple of 8. The weight has `tall` rows, of which these are some.
// new_* may be the memory of master and m; a null one is not wanted.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT)
    sgd(MASTER* new_master, float* new_master_scale, M* new_m, float* new_m_scale, OUTPUT_PARAMETERS(T, weight),
        const MASTER* master, const float* master_scale, const M* m, const float* m_scale, const G* grad,
        const float* scale, const float* apply, const float* learning_rate, const int* step, float momentum, float decay,
        double rate, u32 seed_low, u32 key_high, i64 count, i64 origin, i64 tall) {
    __shared__ __align__(128) u8 tile[pair_bytes(ROWS, SPAN)];
    if (*apply == 0) return;
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    int first_column = TILED ? blockIdx.x % ACROSS * SPAN : 0, column = first_column + lane * N;
    i64 first_row = TILED ? static_cast<i64>(blockIdx.x / ACROSS) * ROWS : static_cast<i64>(blockIdx.x) * SLOTS;
    i64 turn = TILED ? SLOTS : static_cast<i64>(gridDim.x) * SLOTS;
    // the last row of 32 * N may be a part of one
    i64 end = column >= C ? 0 : TILED ? min(count / C, first_row + ROWS) : (count - column + C - 1) / C;
    i64 row = first_row + ((FORMS & COL) ? 2 * slot : slot);
    State next;
    auto block_of = [&](i64 row) { return row * ((C + BLOCK - 1) / BLOCK) + column / BLOCK; };
    auto read = [&](i64 at, i64 row) {
        i64 block = IN_BLOCKS ? block_of(row) : 0;
        next.grad.load(grad + at);
        if constexpr (MOMENTUM != 0) next.m.load(m, m_scale, at, block);
        next.master.load(master, master_scale, at, block);
    };
    if (row < end) read(row * C + column, row);
    float factor = *scale, lr = static_cast<float>(static_cast<double>(*learning_rate) * rate);
    Key key = {static_cast<u32>(*step), seed_low, key_high};
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, weight));
    u32 even[(N + 3) / 4];  // bytes of a pair's first row
#pragma unroll 1
    while (IN_BLOCKS ? __ballot_sync(0xffffffffu, row < end) != 0 : row < end) {
        bool odd = row % 2, in = !IN_BLOCKS || row < end;  // lanes without numbers help to find those of the largest size
        i64 at = row * C + column;
        if constexpr ((FORMS & COL) != 0) turn = odd ? 2 * SLOTS - 1 : 1;
        float g[N], buffer[N] = {}, w[N];
        next.grad.get(g);
        if constexpr (MOMENTUM != 0) next.m.get(buffer);
        next.master.get(w);
        if constexpr (IN_BLOCKS) {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (!in) g[j] = buffer[j] = w[j] = 0;
        }
        if (row + turn < end) read(at + turn * C, row + turn);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float x = g[j] * factor + decay * w[j];
            buffer[j] = MOMENTUM ? momentum * buffer[j] + x : x;
            w[j] = w[j] - lr * (MOMENTUM && NESTEROV ? x + momentum * buffer[j] : buffer[j]);
        }
        if constexpr (MOMENTUM != 0) {
            u32 of_m[N] = {};
            if constexpr (sizeof(M) <= 2) {
#pragma unroll
                for (int four = 0; four < N; four += 4) {
                    u32 word[4];
                    philox(static_cast<u64>(origin + at + four) / 4, MOMENTS, key, word);
#pragma unroll
                    for (int j = 0; j < 4; j++) of_m[four + j] = word[j] & 0xffffu;
                }
            }
            store_moment<false, false>(new_m, new_m_scale, at, block_of(row), buffer, of_m, in, column % BLOCK == 0);
        }
        u32 of_w[N] = {};
        if constexpr (sizeof(MASTER) <= 2) {
            u32 word[4];
            philox(static_cast<u64>(origin + at) / 8, OF_MASTER, key, word);
#pragma unroll
            for (int j = 0; j < N; j++) {
                bool upper = N == 4 ? at / 4 % 2 : j >= 4;  // elements 4 to 7 of a block have the upper halves
                of_w[j] = upper ? word[j % 4] >> 16 : word[j % 4] & 0xffffu;
            }
        }
        if constexpr (sizeof(MASTER) == 2) {
#pragma unroll
            for (int j = 0; j < N; j++) w[j] = raised(w[j], of_w[j]);
        }
        if constexpr (IS_CODED<MASTER>)
            store_moment<false, true>(new_master, new_master_scale, at, block_of(row), w, of_w, in, column % BLOCK == 0);
        else if (in)
            store_plain(new_master, at, w);
        if constexpr (FORMS != 0) if (in) {
            if constexpr (sizeof(MASTER) == 2) {
#pragma unroll
                for (int j = 0; j < N; j++) w[j] = __uint_as_float(__float_as_uint(w[j]) & 0xffff0000u);
            }
            u32 bytes[(N + 3) / 4];
            sink.put(at, w, bytes);
            if constexpr ((FORMS & COL) != 0) {
                if (!odd) {
#pragma unroll
                    for (int i = 0; i < (N + 3) / 4; i++) even[i] = bytes[i];
                }
                if (odd || row + 1 == end)
                    store_pair<N>(tile + pair_at(static_cast<int>(row - first_row) / 2, lane * N, PITCH), even, bytes);
            }
        }
        row += turn;
    }
    if constexpr ((FORMS & COL) != 0) {
        __syncthreads();
        auto place = [=](int c) { return first_column + c < C ? first_column + c : -1; };
        write_transposed<ROWS, TILE_THREADS>(tile, PITCH, weight_col, SPAN, place, first_row, count / C, tall);
    }
    sink.finish();
}
