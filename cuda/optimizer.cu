// The update: sums of squares, the step's global norm and scale, and AdamW in one pass.
//
// adamw: a block owns tiles of rows and 32*N columns (parameters are seen as rows of a fixed width where no transposed form
// is wanted), a lane N elements. Every operation is rounded by itself, in the order of the reference (no fused products:
// compile.py), and bits come from Philox4x32-10 by address, so that results equal the reference bit for bit. What is stored
// in bf16 is rounded stochastically; with `apply` 0 nothing is written.
//
// Measured on an H200 with a 7B gate-up matrix: all fp32 4100 GB/s, 95% of a copy; bf16 moments 3889, 94%; all bf16 2990,
// 70%, bound by the instructions of Philox.
//
// Architectures: 80 86 89 90 100 120
// Constants: MASTER, M, V, G, T (dtypes of master, moments, gradient, weight), C (columns), N, FORMS, E4M3

#include "common.cuh"
#include "constants"
#include "forms.cuh"
#include "random.cuh"

constexpr int SPAN = 32 * N, ACROSS = (C + SPAN - 1) / SPAN, PITCH = tile_pitch(SPAN);
static_assert(N % 4 == 0, "a Philox block makes the bits of 4 elements");

// v as stored in S: bf16 up or down by the low 16 bits of each element's word; infinities and NaN pass
template <typename S>
__device__ __forceinline__ void round_for(float (&v)[N], i64 first, u32 purpose, Key key) {
    if constexpr (sizeof(S) == 2) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            u32 word[4];
            philox(static_cast<u64>(first + i) / 4, purpose, key, word);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 bits = __float_as_uint(v[i + j]);
                if ((bits & 0x7f800000u) != 0x7f800000u) v[i + j] = __uint_as_float(bits + (word[j] & 0xffffu) & 0xffff0000u);
            }
        }
    }
}

// 1 - beta^step in f64, then rounded
__device__ __forceinline__ float bias(double beta, int step) {
    double power = 1;
    for (u32 left = step; left; left >>= 1, beta *= beta)
        if (left & 1) power *= beta;
    return static_cast<float>(1 - power);
}

// a / b rounded to nearest, from the rounded inverse of b: one correction makes it exact (Markstein, 1990)
__device__ __forceinline__ float divided(float a, float b, float inverse) {
    float q = a * inverse;
    return isfinite(q) ? fmaf(fmaf(-q, b, a), inverse, q) : q;
}

// new_* may be the memory of master, m and v; a null one is not wanted. decay = weight_decay.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, N > 4 && (FORMS & COL) == 0 ? 4 : 2)
    adamw(MASTER* new_master, M* new_m, V* new_v, OUTPUT_PARAMETERS(T, weight), const MASTER* master, const M* m, const V* v,
          const G* grad, const float* scale, const float* apply, const float* learning_rate, const int* step, double beta_1,
          double beta_2, float epsilon, double decay, u32 seed_low, u32 key_high, i64 rows) {
    __shared__ __align__(16) u8 tile[(FORMS & COL) ? TILE_ROWS * PITCH : 4];
    __shared__ float cells[4];
    if (*apply == 0) return;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) cells[0] = bias(beta_1, *step);
    if (threadIdx.x == 32) cells[1] = bias(beta_2, *step);
    if (threadIdx.x == 64) cells[2] = static_cast<float>(1 - static_cast<double>(*learning_rate) * decay);
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 first_row = static_cast<i64>(blockIdx.x / ACROSS) * TILE_ROWS;
    Key key = {static_cast<u32>(*step), seed_low, key_high};
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, weight));
    float factor = *scale, lr = *learning_rate;
    float b1 = static_cast<float>(beta_1), c1 = static_cast<float>(1 - beta_1);
    float b2 = static_cast<float>(beta_2), c2 = static_cast<float>(1 - beta_2);
    __syncthreads();
    float bias_1 = cells[0], bias_2 = cells[1], shrink = cells[2];
    float inverse_1 = 1.0f / bias_1, inverse_2 = 1.0f / bias_2;
#pragma unroll 1
    for (int i = warp; i < TILE_ROWS; i += TILE_WARPS) {
        i64 row = first_row + i, at = row * C + column;
        if (row >= rows || column >= C) continue;
        Pack<MASTER, N> read_master;
        Pack<M, N> read_m;
        Pack<V, N> read_v;
        Pack<G, N> read_g;
        read_g.load(grad + at);
        read_m.load(m + at);
        read_v.load(v + at);
        read_master.load(master + at);
        float g[N], first[N], second[N], w[N];
        read_g.get(g);
        read_m.get(first);
        read_v.get(second);
        read_master.get(w);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float x = g[j] * factor;
            first[j] = b1 * first[j] + c1 * x;
            second[j] = b2 * second[j] + c2 * (x * x);
            float root = sqrtf(divided(second[j], bias_2, inverse_2)) + epsilon;
            w[j] = w[j] * shrink - lr * (divided(first[j], bias_1, inverse_1) / root);
        }
        round_for<M>(first, at, FOR_M, key);
        round_for<V>(second, at, FOR_V, key);
        round_for<MASTER>(w, at, FOR_MASTER, key);
        if (new_m) store(new_m + at, first);
        if (new_v) store(new_v + at, second);
        if (new_master) store(new_master + at, w);
        sink.put(at, w, tile + i * PITCH + lane * N);
    }
    if constexpr ((FORMS & COL) != 0) {
        __syncthreads();
        write_columns<TILE_ROWS, TILE_THREADS>(
            tile, PITCH, weight_col, min(SPAN, C - first_column), [=](int c) { return first_column + c; }, first_row, rows);
    }
    sink.finish();
}
