// NF4's scales in 8 bits (`Nested` in llmq/scaling.py): less their mean, under an f32 scale for each 256 of a tensor.
//
// absmax_mean: one block adds up a tensor's scales in f64, a thread every 1024th in turn, then halves of the threads' sums,
// as `mean_of` in llmq/few_bits.py does. It is read once, by one multiprocessor: 4 million scales are a matrix of 2^28.
// nest: a warp owns 256 scales, a lane every 32nd. The code of a number is found among the 256 that codes stand for, which a
// block makes first (`dynamic_map`): taken to one of 65,536 steps, as bitsandbytes' CPU build does. Not measured yet.
//
// Architectures: 80 86 89 90 100 120
// Constants: GROUP (scales that share a place of the table; 256 or a divisor)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, SUMMED = 1024, MAP = 256, NESTED = 256;

// mean (1,) <- absmax (count,)
extern "C" __global__ void __launch_bounds__(SUMMED) absmax_mean(float* mean, const float* absmax, i64 count) {
    __shared__ double sums[SUMMED];
    double sum = 0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < count; i += SUMMED) sum += static_cast<double>(absmax[i]);
    sums[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll 1
    for (int half = SUMMED / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *mean = static_cast<float>(sums[0] / static_cast<double>(count));
}

// the c-th of 2^i + 1 borders between 0.1 and 1, from the nearer end
__device__ __forceinline__ float border(int i, int c) {
    int count = 1 << i;
    double step = static_cast<double>((1.0f - 0.1f) / static_cast<float>(count));
    double x = c < (count + 1) / 2 ? static_cast<double>(0.1f) + c * step : 1.0 - (count - c) * step;
    return static_cast<float>(x);
}

// the k-th of the 127 numbers above 0 and below 1
__device__ __forceinline__ float dynamic_number(int k) {
    constexpr float POWERS[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    int i = 0;
    while (k + 1 >= 2 << i) i++;
    int c = k + 1 - (1 << i);
    return POWERS[i] * ((border(i, c) + border(i, c + 1)) * 0.5f);
}

// The scales (count,) of one tensor; out is all of the bytes, of which it has the table from group `first_group` on, with
// the mean in its first place already, and the codes from byte `first_code` on.
extern "C" __global__ void __launch_bounds__(THREADS)
    nest(u8* out, const float* absmax, i64 first_group, i64 first_code, i64 count) {
    __shared__ float map[MAP];
    float* numbers = reinterpret_cast<float*>(out);
    float* table = numbers + MAP + 2 * first_group;
    int k = static_cast<int>(threadIdx.x) - 127;
    map[threadIdx.x] = k == 0 ? 0.0f : k == 128 ? 1.0f : k > 0 ? dynamic_number(k - 1) : -dynamic_number(-k - 1);
    __syncthreads();
    if (blockIdx.x == 0) numbers[threadIdx.x] = map[threadIdx.x];
    i64 start = (static_cast<i64>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32) * NESTED;
    if (start >= count) return;
    int lane = threadIdx.x % 32, here = static_cast<int>(min(count - start, static_cast<i64>(NESTED)));
    float mean = table[1], apart[NESTED / 32];
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < NESTED / 32; j++) {
        int i = j * 32 + lane;
        apart[j] = i < here ? absmax[start + i] - mean : 0.0f;
        most = max(most, __float_as_uint(apart[j]) & 0x7fffffffu);
    }
    float scale = __uint_as_float(warp_max(most));
    bool is_some = scale > 0;
    float inverse = __frcp_rn(is_some ? scale : 1.0f);
#pragma unroll
    for (int j = 0; j < NESTED / 32; j++) {
        int i = j * 32 + lane;
        float units = is_some ? apart[j] * inverse : -1.0f, steps = floorf((units + 1.0f) * 32767.5f + 0.5f);
        float x = static_cast<float>(static_cast<double>(steps) / 32767.5 - 1.0);
        u32 code = 0;  // how many means of neighbours are below
#pragma unroll
        for (u32 step = MAP / 2; step > 0; step /= 2)
            if (x > (map[code + step - 1] + map[code + step]) * 0.5f) code += step;
        if (x != x) code = MAP - 1;
        if (i < here) out[first_code + start + i] = static_cast<u8>(code);
    }
    i64 first = start / GROUP;
    for (int group = lane; group * GROUP < here; group += 32) {
        table[2 * (first + group)] = scale;
        if (first + group) table[2 * (first + group) + 1] = mean;
    }
}
