// NEFTune: uniform noise in [-scale, scale) on the embedded tokens, out = res + u * scale; out may be the memory of res.
//
// A thread owns N consecutive elements of one sample, and makes their bits from their address: the sample's place in the
// run's sequence stands where the optimizer has the step. Every operation is rounded by itself, u is exact: results equal
// the reference bit for bit. Not tuned: one pass over (B,T,C), once per micro-step.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype), N

#include "common.cuh"
#include "constants"
#include "random.cuh"

constexpr int THREADS = 256;

// out, res (B, size); samples (B,); blockIdx: (piece, sample)
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_noise(T* out, const T* res, const int* samples, float scale, u32 seed_low, u32 key_high, i64 size) {
    i64 first = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N;
    if (first >= size) return;
    i64 at = static_cast<i64>(blockIdx.y) * size + first;
    Key key = {static_cast<u32>(samples[blockIdx.y]), seed_low, key_high};
    float v[N];
    load(res + at, v);
    u32 word[4];
    int offset = static_cast<int>(first % 4);  // 0 but for N = 2 and 1, where a block of bits is shared
#pragma unroll
    for (int j = 0; j < N; j++) {
        if (j % 4 == 0) philox(static_cast<u64>(first + j) / 4, FOR_EMBEDDING, key, word);
        int own = N < 4 ? offset + j : j % 4;
        u32 bits = own == 0 ? word[0] : own == 1 ? word[1] : own == 2 ? word[2] : word[3];
        v[j] += (static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f) * scale;
    }
    store(out + at, v);
}
