// Numbers of 4 and 8 bits with a scale for each block of a row, as llmq/few_bits.py and llmq/scaling.py define them: what
// frozen weights are held in, made while they are loaded, a slice of rows at a time.
//
// pack: neighbouring lanes own the numbers under one scale, N each, and find their largest by a butterfly. NF4 has blocks of
// 64 flat numbers (C is 64 then), whose scale is their largest magnitude; MXFP4 of 32 of a row, whose scale is a power of
// two in a byte; e4m3 of 128 of a row, whose scale is a power of two in f32. What is not finite is stored as NumPy does, but for the sign of NaN.
// Not measured yet: 2 or 4 bytes read for 0.5 or 1 written, once in a run.
//
// Architectures: 80 86 89 90 100 120
// Constants: X (dtype read), T (dtype of the value), C (columns), N (2 or 4), FORMAT (0: NF4, 1: MXFP4, 2: e4m3)

#include "common.cuh"
#include "constants"
constexpr int FORMS = 0;
#include "forms.cuh"
#include "eight_bits.cuh"

constexpr int NF4 = 0, MXFP4 = 1, THREADS = 256;
constexpr int PER_SCALE = FORMAT == NF4 ? 64 : FORMAT == MXFP4 ? 32 : BLOCK;
constexpr int LANES = PER_SCALE / N, ACROSS = (C + PER_SCALE - 1) / PER_SCALE;
static_assert(LANES <= 32, "a warp holds the numbers under a scale");

// NF4's levels but the last: halfway between two neighbours a number goes to the lower
__device__ const float NF4_LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

__device__ __forceinline__ u32 nf4_code(float x) {
    u32 code = 0;
#pragma unroll
    for (int i = 0; i < 15; i++) code += x > (NF4_LEVELS[i] + NF4_LEVELS[i + 1]) * 0.5f;
    return code;
}

// to nearest even, of x in units of the scale
__device__ __forceinline__ u32 e2m1_code(float x, u32 sign) {
    float a = fabsf(x);
    u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return code | sign << 3;
}

// out (rows,C) <- x (rows,C), and scales: f32, or bytes of MXFP4
extern "C" __global__ void __launch_bounds__(THREADS) pack(u8* out, u8* scales, const X* x, i64 rows) {
    i64 block = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) / LANES, row = block / ACROSS;
    int column = static_cast<int>(block % ACROSS) * PER_SCALE + static_cast<int>(threadIdx.x % LANES) * N;
    bool is_there = row < rows && column < C;
    i64 at = row * C + column;
    Pack<X, N> read = {};
    if (is_there) read.load(x + at);
    float v[N];
    read.get(v);
    Pack<T, N> value;
    value.set(v);
    value.get(v);
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < N; j++) most = max(most, __float_as_uint(v[j]) & 0x7fffffffu);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (!is_there) return;
    bool is_first = threadIdx.x % LANES == 0;
    float largest = __uint_as_float(most);
    if constexpr (FORMAT == NF4 || FORMAT == MXFP4) {
        u32 bytes = 0;
        if constexpr (FORMAT == NF4) {
            float inverse = __frcp_rn(largest < 1e-38f ? 1e-38f : largest);
            if (is_first) reinterpret_cast<float*>(scales)[block] = largest;
#pragma unroll
            for (int j = 0; j < N; j++) bytes |= nf4_code(v[j] * inverse) << 4 * (j ^ 1);
        } else {
            u32 power = most >> 23, e = most > 0x7f800000u ? 0 : power == 255 ? 255 : power > 2 ? power - 2 : 0;
            float inverse = __uint_as_float(e == 254 ? 1u << 22 : (254 - e) << 23);
            if (is_first) scales[block] = static_cast<u8>(e);
#pragma unroll
            for (int j = 0; j < N; j++)
                bytes |= (e == 255 ? 0 : e2m1_code(v[j] * inverse, __float_as_uint(v[j]) >> 31)) << 4 * j;
        }
        if constexpr (N == 4)
            *reinterpret_cast<u16*>(out + at / 2) = static_cast<u16>(bytes);
        else
            out[at / 2] = static_cast<u8>(bytes);
    } else {
        float scale = power_above(scale_of(largest, 448.0f, 1.0f));
        u32 words[(N + 3) / 4];
        fp8_words<true>(v, __frcp_rn(scale), words);
        if (is_first) reinterpret_cast<float*>(scales)[block] = scale;
        store_bytes<N>(out + at, words);
    }
}
