// The update: AdamW in one pass over master, moments and gradient.
//
// A lane owns N elements at a time and reads its next ones while it computes. Without a transposed form parameters are seen
// as rows of 32 * N, which as many blocks as run at once take in turns; with one a block owns a tile of 64 rows. Every
// operation is rounded by itself, in the order of the reference (no fused products: compile.py), and bits come from
// Philox4x32-7 by address, so that results equal the reference bit for bit. What is stored in bf16 is rounded
// stochastically; with `apply` 0 nothing is written.
//
// Moments in 8 bits (eight_bits.cuh) have a scale for each 128 numbers of a row, which neighbouring lanes hold: the largest
// of the new ones is found by shuffles. Rows whose width is no multiple of that are seen as tiles, as with a transposed
// form. A master in 8 bits is the weight itself: its scales are powers of two, so that what does not change keeps its code.
//
// Measured on an H200 with the gate-up matrix of 0.5B and 7B: all bf16 88 and 92% of a copy (with ten rounds for each of
// three blocks, conversions of f64 constants per element, and a branch per root and quotient 61 and 70%), all f32 94 and
// 93%, f32 master and bf16 moments 92 and 96%, with fp8 in both layouts 83 and 91%.
//
// Architectures: 80 86 89 90 100 120
// Constants: MASTER, M, V, G, T (dtypes of master, moments, gradient, weight), C (columns; 32 * N where not TILED), N,
// TILED (1 where blocks own tiles), RESIDENT (blocks to a multiprocessor, at least), FORMS, E4M3

#include "common.cuh"
#include "eight_bits.cuh"
#include "constants"
#include "forms.cuh"
#include "random.cuh"
#include "update.cuh"

constexpr int LANES = TILE_LANES<N>, SLOTS = TILE_SLOTS<N>, SPAN = LANES * N, ACROSS = (C + SPAN - 1) / SPAN;
constexpr int ROWS = tile_rows(64), PITCH = pair_pitch(SPAN);
constexpr bool IN_BLOCKS = IS_CODED<M> || IS_CODED<V> || IS_CODED<MASTER>;
static_assert(!IN_BLOCKS || SPAN % BLOCK == 0, "a block lies in one row of lanes");
static_assert(!IS_CODED<MASTER> || FORMS == 0, "copies of a weight in 8 bits are made of it");
static_assert(N == 4 || N == 8, "a Philox block makes the bits of 4 elements' moments, or of 8 elements' masters");

// 1 - beta^step in f64, then rounded
__device__ __forceinline__ float bias(double beta, int step) {
    double power = 1;
    for (u32 left = step; left; left >>= 1, beta *= beta)
        if (left & 1) power *= beta;
    return static_cast<float>(1 - power);
}

// a / b rounded to nearest, from the rounded inverse of b: one correction makes it exact (Markstein, 1990), unless the
// first quotient overflows
__device__ __forceinline__ float divided(float a, float b, float inverse) {
    float q = a * inverse;
    return fmaf(fmaf(-q, b, a), inverse, q);
}

// Numbers of a step; those with 1 and 2 are for the first and the second moment.
struct Step {
    float factor, lr, shrink, bias_1, bias_2, inverse_1, inverse_2, epsilon;
};

// (first / bias_1) / (sqrt(second / bias_2) + epsilon), every operation rounded to nearest
__device__ __forceinline__ float exact_update(float first, float second, const Step& s) {
    float v = divided(second, s.bias_2, s.inverse_2), m = divided(first, s.bias_1, s.inverse_1);
    if (!isfinite(v)) v = second * s.inverse_2;
    if (!isfinite(m)) m = first * s.inverse_1;
    return m / (sqrtf(v) + s.epsilon);
}

// The same bits for numbers that are neither very small nor very large, without branches: the instructions that the
// compiler makes of sqrtf and / for these. `outside` remembers whether v was from 2^-101 to 2^35 and |m| from 2^-76 to 2^60.
struct Outside {
    u32 v = 0, m = 0;
    __device__ __forceinline__ void look(float v_hat, float m_hat) {
        v = max(v, __float_as_uint(v_hat) - 0x0d000000u);
        m = max(m, 2 * __float_as_uint(m_hat) - 0x33000000u);  // without its sign
    }
    __device__ __forceinline__ bool any() const { return v >= 0x44000000u || m >= 0x88000000u; }
};

__device__ __forceinline__ float quick_update(float first, float second, const Step& s, Outside& outside) {
    float v = divided(second, s.bias_2, s.inverse_2), m = divided(first, s.bias_1, s.inverse_1), r, inverse;
    outside.look(v, m);
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    float root = v * r;
    root = fmaf(fmaf(-root, root, v), r * 0.5f, root) + s.epsilon;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(root));
    inverse = fmaf(fmaf(-root, inverse, 1.0f), inverse, inverse);
    float q = m * inverse;
    return fmaf(fmaf(-root, q, m), inverse, q);
}

struct State {
    Moment<MASTER, N> master;
    Moment<M, N> m;
    Moment<V, N> v;
    Pack<G, N> grad;
};

// Element i has the random bits of element origin + i, a multiple of 8. The weight has `tall` rows, of which these are some.
// new_* may be the memory of master, m and v; a null one is not wanted. b and c are beta and 1 - beta, decay weight_decay.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, RESIDENT)
    adamw(MASTER* new_master, float* new_master_scale, M* new_m, float* new_m_scale, V* new_v, float* new_v_scale,
          OUTPUT_PARAMETERS(T, weight), const MASTER* master, const float* master_scale, const M* m, const float* m_scale,
          const V* v, const float* v_scale, const G* grad, const float* scale, const float* apply,
          const float* learning_rate, const int* step, double beta_1, double beta_2, float b1, float c1, float b2, float c2,
          float epsilon, double decay, double rate, u32 seed_low, u32 key_high, i64 count, i64 origin, i64 tall) {
    __shared__ __align__(128) u8 tile[pair_bytes(ROWS, SPAN)];
    __shared__ float cells[4];
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
        next.m.load(m, m_scale, at, block);
        next.v.load(v, v_scale, at, block);
        next.master.load(master, master_scale, at, block);
    };
    if (row < end) read(row * C + column, row);
    if (threadIdx.x == 0) cells[0] = bias(beta_1, *step);
    if (threadIdx.x == 32) cells[1] = bias(beta_2, *step);
    if (threadIdx.x == 64) {
        double lr = static_cast<double>(*learning_rate) * rate;
        cells[2] = static_cast<float>(1 - lr * decay);
        cells[3] = static_cast<float>(lr);
    }
    Key key = {static_cast<u32>(*step), seed_low, key_high};
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, weight));
    __syncthreads();
    Step s = {*scale, cells[3], cells[2], cells[0], cells[1], 1.0f / cells[0], 1.0f / cells[1], epsilon};
    bool careful = !(epsilon >= 0 && epsilon < 0x1p35f);
    u32 even[(N + 3) / 4];  // bytes of a pair's first row
#pragma unroll 1
    while (IN_BLOCKS ? __ballot_sync(0xffffffffu, row < end) != 0 : row < end) {
        bool odd = row % 2, in = !IN_BLOCKS || row < end;  // lanes without numbers help to find those of the largest size
        i64 at = row * C + column;
        if constexpr ((FORMS & COL) != 0) turn = odd ? 2 * SLOTS - 1 : 1;
        float g[N], first[N], second[N], w[N];
        next.grad.get(g);
        next.m.get(first);
        next.v.get(second);
        next.master.get(w);
        if constexpr (IN_BLOCKS) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (!in) g[j] = first[j] = second[j] = w[j] = 0;
                if (IS_CODED<V>) second[j] *= second[j];
            }
        }
        if (row + turn < end) read(at + turn * C, row + turn);
        u32 of_master[4];
        if constexpr (sizeof(MASTER) <= 2) philox(static_cast<u64>(origin + at) / 8, OF_MASTER, key, of_master);
#pragma unroll
        for (int four = 0; four < N; four += 4) {
            Outside outside;
#pragma unroll
            for (int j = four; j < four + 4; j++) {
                float x = g[j] * s.factor;
                first[j] = b1 * first[j] + c1 * x;
                second[j] = b2 * second[j] + c2 * (x * x);
                g[j] = quick_update(first[j], second[j], s, outside);
            }
            if (outside.any() || careful) {
#pragma unroll
                for (int j = four; j < four + 4; j++) g[j] = exact_update(first[j], second[j], s);
            }
#pragma unroll
            for (int j = four; j < four + 4; j++) w[j] = w[j] * s.shrink - s.lr * g[j];
            if constexpr (!IN_BLOCKS && (sizeof(M) == 2 || sizeof(V) == 2)) {
                u32 word[4];
                philox(static_cast<u64>(origin + at + four) / 4, MOMENTS, key, word);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (sizeof(M) == 2) first[four + j] = raised(first[four + j], word[j] & 0xffffu);
                    if (sizeof(V) == 2) second[four + j] = raised(second[four + j], word[j] >> 16);
                }
            }
            if constexpr (sizeof(MASTER) == 2) {
                bool upper = N == 4 ? at / 4 % 2 : four == 4;  // elements 4 to 7 of a block have the upper halves
#pragma unroll
                for (int j = 0; j < 4; j++)
                    w[four + j] = raised(w[four + j], upper ? of_master[j] >> 16 : of_master[j] & 0xffffu);
            }
        }
        if constexpr (IN_BLOCKS) {
            u32 of_m[N], of_v[N];
#pragma unroll
            for (int four = 0; four < N; four += 4) {
                u32 word[4];
                philox(static_cast<u64>(origin + at + four) / 4, MOMENTS, key, word);
#pragma unroll
                for (int j = 0; j < 4; j++) of_m[four + j] = word[j] & 0xffffu, of_v[four + j] = word[j] >> 16;
            }
            bool is_first = column % BLOCK == 0;  // of its block
            store_moment<false, false>(new_m, new_m_scale, at, block_of(row), first, of_m, in, is_first);
            store_moment<true, false>(new_v, new_v_scale, at, block_of(row), second, of_v, in, is_first);
        } else {
            store_plain(new_m, at, first);
            store_plain(new_v, at, second);
        }
        if constexpr (IS_CODED<MASTER>) {
            u32 of_w[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                bool upper = N == 4 ? at / 4 % 2 : j >= 4;
                of_w[j] = upper ? of_master[j % 4] >> 16 : of_master[j % 4] & 0xffffu;
            }
            store_moment<false, true>(new_master, new_master_scale, at, block_of(row), w, of_w, in, column % BLOCK == 0);
        } else if (in) {
            store_plain(new_master, at, w);
        }
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
