// Attention of one query per sequence to its cached keys and values: att (B, 1, HEADS * HD), for generation.
//
// A cache row has KV_HEADS keys, then as many values. `attend` splits a sequence's positions into pieces of KEYS: a block
// takes one piece of one key head, brings its keys and values to shared memory in accesses of 16 bytes, all under way at
// once, and leaves for each of the GROUP query heads the largest score, the sum of exp and the unscaled result. `combine`
// adds the pieces up in order, so the result has the same bits in any batch. Pieces that no query sees end at once: a grid
// for the whole cache serves every length, and so does one captured graph.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, HD, GROUP, KV_HEADS, KEYS (a multiple of 32), N

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, WARPS = THREADS / 32, HEADS = GROUP * KV_HEADS, KEPT = 2 * KV_HEADS * HD;
constexpr int PITCH = HD + N;  // of a key in shared memory: threads read a column of keys from different banks
constexpr int PER_KEY = HD / N, LOADS = (2 * KEYS * PER_KEY + THREADS - 1) / THREADS;
constexpr int SIDES = THREADS / KEYS, SCORED = (GROUP + SIDES - 1) / SIDES;      // heads of a thread that makes scores
constexpr int PAIRS = HD / 2, ROOMS = THREADS / PAIRS, SUMMED = (GROUP + ROOMS - 1) / ROOMS;  // of one that adds values
constexpr int PART = GROUP * (HD + 2);  // of a piece: results, then largest scores, then sums
static_assert(HD % 2 == 0 && PAIRS <= THREADS && THREADS % KEYS == 0, "a head is read in pairs");

__device__ __forceinline__ float warp_largest(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attend(float* parts, const T* rot, const T* cache, const int* positions, int length, int window, float scale) {
    extern __shared__ __align__(16) u8 memory[];
    T* rows = reinterpret_cast<T*>(memory);  // keys, then values
    float* q = reinterpret_cast<float*>(memory + 2 * KEYS * PITCH * sizeof(T));
    float* p = q + GROUP * HD;
    int piece = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    i64 sequence = blockIdx.z;
    int last = positions[sequence], first = max(0, last + 1 - window), begin = piece * KEYS;
    int low = max(first - begin, 0), high = min(last + 1 - begin, KEYS);  // the keys of the piece that are seen
    if (low >= high) return;

    Pack<T, N> read[LOADS];
    const T* from = cache + (sequence * length + begin) * KEPT + head * HD;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread, row = at / PER_KEY, key = row % KEYS, value = row / KEYS;
        if (key >= low && key < high && value < 2)
            read[i].load(from + static_cast<i64>(key) * KEPT + value * KV_HEADS * HD + at % PER_KEY * N);
    }
    const T* query = rot + sequence * (HEADS * HD + KEPT) + head * GROUP * HD;
    for (int i = thread; i < GROUP * HD; i += THREADS) q[i] = to_float(query[i]) * scale;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread, row = at / PER_KEY, key = row % KEYS, value = row / KEYS;
        if (key >= low && key < high && value < 2) {
            u32* to = reinterpret_cast<u32*>(rows + row * PITCH + at % PER_KEY * N);
#pragma unroll
            for (int j = 0; j < Pack<T, N>::WORDS; j++) to[j] = read[i].at[j];
        }
    }
    __syncthreads();

    int key = thread % KEYS, side = thread / KEYS;
    float score[SCORED] = {};
    if (key >= low && key < high) {
#pragma unroll 4
        for (int c = 0; c < HD; c += N) {
            float k[N];
            load(rows + key * PITCH + c, k);
#pragma unroll
            for (int i = 0; i < SCORED; i++) {
                int of = side + i * SIDES;
                if (of < GROUP) {
#pragma unroll
                    for (int j = 0; j < N; j++) score[i] = fmaf(q[of * HD + c + j], k[j], score[i]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < SCORED; i++)
        if (side + i * SIDES < GROUP) p[(side + i * SIDES) * KEYS + key] = score[i];
    __syncthreads();

    float* part = parts + ((sequence * KV_HEADS + head) * gridDim.x + piece) * PART;
    for (int of = warp; of < GROUP; of += WARPS) {
        float largest = -3.0e38f, sum = 0;
        for (int i = lane; i < KEYS; i += 32)
            if (i >= low && i < high) largest = fmaxf(largest, p[of * KEYS + i]);
        largest = warp_largest(largest);
        for (int i = lane; i < KEYS; i += 32) {
            float x = i >= low && i < high ? expf(p[of * KEYS + i] - largest) : 0.0f;
            p[of * KEYS + i] = x;
            sum += x;
        }
        sum = warp_sum(sum);
        if (lane == 0) part[GROUP * HD + of] = largest, part[GROUP * (HD + 1) + of] = sum;
    }
    __syncthreads();

    int room = thread / PAIRS, column = thread % PAIRS * 2;
    if (room >= ROOMS) return;
    float out[SUMMED][2] = {};
    for (int i = low; i < high; i++) {
        float a, b;
        const T* v = rows + (KEYS + i) * PITCH + column;
        a = to_float(v[0]), b = to_float(v[1]);
#pragma unroll
        for (int j = 0; j < SUMMED; j++) {
            int of = room + j * ROOMS;
            if (of < GROUP) {
                float weight = p[of * KEYS + i];
                out[j][0] = fmaf(weight, a, out[j][0]), out[j][1] = fmaf(weight, b, out[j][1]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < SUMMED; j++) {
        int of = room + j * ROOMS;
        if (of < GROUP) part[of * HD + column] = out[j][0], part[of * HD + column + 1] = out[j][1];
    }
}

// a block for each query head and sequence
extern "C" __global__ void __launch_bounds__(HD)
    combine(T* att, const float* parts, const int* positions, int pieces, int window) {
    int head = blockIdx.x / GROUP, of = blockIdx.x % GROUP, column = threadIdx.x;
    i64 sequence = blockIdx.y;
    int last = positions[sequence], first = max(0, last + 1 - window);
    const float* part = parts + (sequence * KV_HEADS + head) * pieces * PART;
    float largest = -3.0e38f, sum = 0, out = 0;
    for (int i = first / KEYS; i <= last / KEYS; i++) largest = fmaxf(largest, part[static_cast<i64>(i) * PART + GROUP * HD + of]);
#pragma unroll 4
    for (int i = first / KEYS; i <= last / KEYS; i++) {
        const float* one = part + static_cast<i64>(i) * PART;
        float weight = expf(one[GROUP * HD + of] - largest);
        sum = fmaf(weight, one[GROUP * (HD + 1) + of], sum);
        out = fmaf(weight, one[of * HD + column], out);
    }
    att[(sequence * HEADS + blockIdx.x) * HD + column] = narrow<T>(out / sum);
}
