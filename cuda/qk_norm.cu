// RMSNorm of each query and key head over its HD channels (Qwen3), times weight + OFFSET, values unchanged; and its
// gradient.
//
// LANES lanes own a head of a row, N channels in each lane. Forward: heads of all rows lie side by side, so a warp reads one
// run of memory. Backward: a block owns 256 rows of as many heads as fill about 128 columns, so that column sums and the
// sums for the weights stay in registers, and the transposed form has runs of 128 bytes; it writes one partial row for each
// of its heads, and `sum_weights` adds the rows in order.
//
// Measured on an H200 in bf16, 18 heads of 64 and 36 of 128: forward 93 and 95% of a copy, backward 85 and 91%, with fp8 in
// both layouts in place of the value 78 and 83%.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, G (dtype of the weights' gradients), HQ, HKV, HD, N, LANES (a power of two >= HD / N), FORMS, E4M3, OFFSET

#include "common.cuh"
#include "constants"
#include "forms.cuh"
#include "columns.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, HEADS = HQ + 2 * HKV, NORMED = HQ + HKV;
constexpr int AT_ONCE = 32 / LANES, STEPS = 2;  // heads per warp and access, accesses in flight
static_assert(LANES <= 32 && LANES * N >= HD, "a head fits the lanes of one warp");

// head `task` of all rows' heads: (row, head)
extern "C" __global__ void __launch_bounds__(THREADS)
    qk_norm_forward(T* out, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, float eps, i64 rows) {
    int lane = threadIdx.x % LANES, channel = lane * N;
    u32 tasks = static_cast<u32>(rows) * HEADS, first = (blockIdx.x * WARPS + threadIdx.x / 32) * AT_ONCE * STEPS;
    first += threadIdx.x % 32 / LANES;
    Pack<T, N> read[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 task = first + i * AT_ONCE;
        if (task < tasks && channel < HD) read[i].load(qkv + static_cast<i64>(task) * HD + channel);
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        u32 task = first + i * AT_ONCE;
        bool real = task < tasks && channel < HD;
        int head = static_cast<int>(task % HEADS);
        float v[N], sum = 0;
        read[i].get(v);
        if (real) {
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(v[j], v[j], sum);
        }
        float s = 1.0f / sqrtf(warp_sum<LANES>(sum) * (1.0f / HD) + eps);
        if (!real) continue;
        if (head < NORMED) {
            if (rstd && lane == 0) rstd[static_cast<i64>(task / HEADS) * NORMED + head] = s;
            float w[N];
            load_weights<OFFSET>((head < HQ ? q_weight : k_weight) + channel, w);
#pragma unroll
            for (int j = 0; j < N; j++) v[j] *= s * w[j];
        }
        if constexpr (FORMS != 0) store(out + static_cast<i64>(task) * HD + channel, v);
    }
}

// Per head with n = x * rstd and g = d_out * (weight + OFFSET): d_qkv = rstd * (g - n * mean(g * n)); partial (rows / 256, NORMED, HD)
// <- the sums of d_out * n.
constexpr int ROOM = N < 4 ? 32 : 128 / N;  // for lanes of heads side by side: a warp at most
constexpr int TILE_HEADS = ROOM > LANES ? ROOM / LANES : 1, ACROSS = (HEADS + TILE_HEADS - 1) / TILE_HEADS;
constexpr int WIDE = TILE_HEADS * LANES, SLOTS = THREADS / WIDE, PITCH = pair_pitch(WIDE * N);  // lanes and rows of a block
constexpr int WIDTH = HEADS * HD, BLOCK_ROWS = 256, TILE = (FORMS & COL) ? 128 : BLOCK_ROWS;
constexpr bool FULL = (FORMS & COL) && (FORMS & SUMS);  // needs more registers
constexpr int PAIRS = FULL ? 2 : 1;  // of rows in flight
// Blocks to a multiprocessor: 80 registers are too few for what the compiler makes of it for newer cards.
#if __CUDA_ARCH__ <= 900
constexpr int RESIDENT = FULL ? 2 : 3;
#else
constexpr int RESIDENT = 2;
#endif
constexpr int TURN = 2 * PAIRS * SLOTS;
constexpr bool EVERY = HEADS % TILE_HEADS == 0 && LANES * N == HD;  // no lane without channels
static_assert(WIDE <= 32 && TILE % TURN == 0, "a warp has whole rows of a tile");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    qk_norm_backward(OUTPUT_PARAMETERS(T, d_qkv), float* partial, const T* d_out, const T* qkv, const T* q_weight,
                     const T* k_weight, const float* rstd, i64 rows) {
    __shared__ __align__(128) u8 tile[pair_bytes(TILE, WIDE * N)];
    __shared__ __align__(16) float shared[WARPS * WIDE * N];
    int lane = threadIdx.x % WIDE, slot = threadIdx.x / WIDE, channel = lane % LANES * N;
    int first_head = blockIdx.x % ACROSS * TILE_HEADS, head = first_head + lane / LANES, column = head * HD + channel;
    bool real = EVERY || (head < HEADS && channel < HD), normed = real && head < NORMED;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * BLOCK_ROWS, begin = block_row * WIDTH + column;
    int block_rows = static_cast<int>(min(rows - block_row, static_cast<i64>(BLOCK_ROWS)));
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, d_qkv));
    sink.begin_at(begin);
    d_out += begin;
    qkv += begin;
    rstd += block_row * NORMED + head;
    // the output's column of one of a tile's
    auto place = [=](int c) {
        int of_head = first_head + c / (LANES * N), in_head = c % (LANES * N);
        return EVERY || (of_head < HEADS && in_head < HD) ? of_head * HD + in_head : -1;
    };
    float sums[N] = {}, d_weight[N] = {};
    Pack<T, N> weight = {};
    if (normed) weight.load((head < HQ ? q_weight : k_weight) + channel);
    Pack<T, N> read[PAIRS][2], d_read[PAIRS][2];
    float s[PAIRS][2];
    auto begin_reading = [&](int first_row) {
        int first = first_row + 2 * slot;
        const T *d_from = d_out + first * WIDTH, *from = qkv + first * WIDTH;
        const float* s_from = rstd + first * NORMED;
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) {
            int row = i / 2 * 2 * SLOTS + i % 2;
            if (row >= block_rows - first || !real) continue;
            d_read[i / 2][i % 2].load(d_from + row * WIDTH);
            if (!normed) continue;
            read[i / 2][i % 2].load(from + row * WIDTH);
            s[i / 2][i % 2] = s_from[row * NORMED];
        }
    };
    begin_reading(0);
#pragma unroll 1
    for (int first_row = 0; first_row < (block_rows + TILE - 1) / TILE * TILE; first_row += TURN) {
        int first = first_row + 2 * slot;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            int left = block_rows - first - 2 * i * SLOTS;
            float n[2][N], d[2][N], w[N], dot[2] = {};
            u32 bytes[2][(N + 3) / 4] = {};
            get_weights<OFFSET>(weight, w);
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                d_read[i][odd].get(d[odd]);
                read[i][odd].get(n[odd]);
                if (!normed || odd >= left) continue;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    n[odd][j] *= s[i][odd];
                    float both = d[odd][j] * n[odd][j];
                    d_weight[j] += both;
                    dot[odd] = fmaf(both, w[j], dot[odd]);
                }
            }
            // every lane is here: a shuffle needs its whole warp
            float mean[2] = {warp_sum<LANES>(dot[0]) * (1.0f / HD), warp_sum<LANES>(dot[1]) * (1.0f / HD)};
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                if (FORMS == 0 || !real || odd >= left) continue;
                if (normed) {
#pragma unroll
                    for (int j = 0; j < N; j++) d[odd][j] = s[i][odd] * (d[odd][j] * w[j] - n[odd][j] * mean[odd]);
                }
                sink.put((first + 2 * i * SLOTS + odd) * WIDTH, d[odd], bytes[odd]);
                if constexpr ((FORMS & SUMS) != 0) {
#pragma unroll
                    for (int j = 0; j < N; j++) sums[j] += d[odd][j];
                }
            }
            int pair = first_row % TILE / 2 + slot + i * SLOTS;
            store_pair<N>(tile + pair_at(pair, lane * N, PITCH), bytes[0], bytes[1]);
        }
        bool full = (FORMS & COL) && (first_row + TURN) % TILE == 0;
        if (full) __syncthreads();
        if (first_row + TURN < block_rows) begin_reading(first_row + TURN);  // while the tile is written
        if constexpr ((FORMS & COL) != 0) {
            if (!full) continue;
            i64 tile_row = block_row + first_row + TURN - TILE;
            write_transposed<TILE, THREADS>(tile, PITCH, d_qkv_col, WIDE * N, place, tile_row, rows);
            __syncthreads();
        }
    }
    sink.finish();
    if constexpr ((FORMS & SUMS) != 0)
        store_sums<WIDE, N>(sums, d_qkv_sums + block_row / SUMS_ROWS * WIDTH, place, shared);
    if (partial) {
        auto place_normed = [=](int c) { return place(c) < NORMED * HD ? place(c) : -1; };
        store_sums<WIDE, N>(d_weight, partial + block_row / BLOCK_ROWS * NORMED * HD, place_normed, shared);
    }
}

// d_q_weight, d_k_weight (HD,) <- partial (blocks, NORMED, HD); a null one is not wanted. A block of 1024 owns 8 channels of
// one weight: thread t adds the rows t / 8, t / 8 + 128, ..., then the threads of a channel are added in order.
extern "C" __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_weights(G* d_q_weight, G* d_k_weight, const float* partial, int blocks, int add_q, int add_k) {
    constexpr int SIDE = 8, THREADS_OF = 32 * SUM_WARPS / SIDE, GROUPS = (HD + SIDE - 1) / SIDE;
    __shared__ float shared[THREADS_OF][SIDE + 1];
    bool of_q = blockIdx.x < GROUPS;
    G* d_weight = of_q ? d_q_weight : d_k_weight;
    if (!d_weight) return;
    int side = threadIdx.x % SIDE, own = threadIdx.x / SIDE, channel = blockIdx.x % GROUPS * SIDE + side;
    int heads = of_q ? HQ : HKV, parts = blocks * heads, first = of_q ? 0 : HQ;
    float total = 0;
    if (channel < HD) {
#pragma unroll 8
        for (int part = own; part < parts; part += THREADS_OF)
            total += partial[(static_cast<i64>(part / heads) * NORMED + first + part % heads) * HD + channel];
    }
    shared[own][side] = total;
    __syncthreads();
    if (own || channel >= HD) return;
    total = 0;
#pragma unroll 16
    for (int i = 0; i < THREADS_OF; i++) total += shared[i][side];
    bool add = of_q ? add_q : add_k;
    d_weight[channel] = narrow<G>(add ? to_float(d_weight[channel]) + total : total);
}
