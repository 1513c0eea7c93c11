// Dropout: out = keep x / (1 - rate) + residual; out may be the memory of x or of the residual.
//
// A thread owns N consecutive elements of one token, and makes their bits from their address: the place of the token's
// sample in the run's sequence stands where the optimizer has the step. 16 bits decide on an element, so that a block
// of random words serves 8. Every operation is rounded by itself: results equal the reference bit for bit. Not tuned:
// one pass over (B,T,K).
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype), N, WIDTH

#include "common.cuh"
#include "constants"
#include "random.cuh"

constexpr int THREADS = 256;

// out, x, residual (tokens, WIDTH); samples (B,); the first token is number `first` of B rows of `length`
extern "C" __global__ void __launch_bounds__(THREADS)
    dropout(T* out, const T* x, const int* samples, const T* residual, float scale, u32 level, u32 seed_low,
            u32 key_high, i64 first, i64 length, i64 size) {
    i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * N;
    if (at >= size) return;
    i64 row = at / WIDTH, token = first + row, sample = token / length;
    u64 element = static_cast<u64>(token - sample * length) * WIDTH + static_cast<u64>(at - row * WIDTH);
    Key key = {static_cast<u32>(samples[sample]), seed_low, key_high};
    float v[N], added[N];
    load(x + at, v);
#pragma unroll
    for (int j = 0; j < N; j++) added[j] = 0.0f;
    if (residual) load(residual + at, added);
    u32 word[4];
#pragma unroll
    for (int j = 0; j < N; j++) {
        u32 own = static_cast<u32>(element + j) % 8;
        if (j == 0 || own == 0) philox((element + j) / 8, FOR_DROPOUT, key, word);
        u32 pair = own % 4 == 0 ? word[0] : own % 4 == 1 ? word[1] : own % 4 == 2 ? word[2] : word[3];
        u32 bits = own < 4 ? pair & 0xFFFFu : pair >> 16;
        v[j] = bits >= level ? v[j] * scale : 0.0f;
        if (residual) v[j] += added[j];
    }
    store(out + at, v);
}
