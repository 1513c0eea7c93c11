// Attention of one new token per sequence, from its q, k and v before the rotary embedding: att (B, 1, HEADS * HD) and its
// row of the cache, for generation. One launch, as a small model's step is bound by launches.
//
// A cache row has KV_HEADS turned keys, then as many values. A block takes a piece of KEYS positions of one sequence and key
// head, brings its keys and values to shared memory in accesses of 16 bytes, all under way at once, and turns the GROUP
// query heads itself. The block that has the token's own position turns its key and puts key and value in the cache; no
// other block reads them. Each block leaves the largest score, the sum of exp and the unscaled result of every query head,
// and the last one of a sequence and key head to be done adds the pieces up, in their order, so the bits do not depend on
// which one that is. Pieces that the query does not see end at once: one grid, and one captured graph, serves every length.
//
// Architectures: 80 86 89 90 100 120
// Constants: T, HD, GROUP, KV_HEADS, KEYS (a multiple of 32), N, PLACES (sequences times key heads), CAP (of scores, the bits
// of the f32; 0: none)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, WARPS = THREADS / 32, HEADS = GROUP * KV_HEADS, KEPT = 2 * KV_HEADS * HD;
constexpr int PITCH = HD + N;  // of a key in shared memory: threads read a column of keys from different banks
constexpr int PER_KEY = HD / N, LOADS = (2 * KEYS * PER_KEY + THREADS - 1) / THREADS;
constexpr int SIDES = THREADS / KEYS, SCORED = (GROUP + SIDES - 1) / SIDES;      // heads of a thread that makes scores
constexpr int PAIRS = HD / 2, ROOMS = THREADS / PAIRS, SUMMED = (GROUP + ROOMS - 1) / ROOMS;  // of one that adds values
constexpr int PART = GROUP * (HD + 2);  // of a piece: results, then largest scores, then sums
constexpr int HALF = HD / 2;
constexpr int AT_ONCE = 8;  // pieces whose results are under way when they are added up
__device__ u32 arrived[PLACES];  // blocks that have left their piece; the last one sets it back, so calls stay on one lane
static_assert(HD % 2 == 0 && PAIRS <= THREADS && THREADS % KEYS == 0, "a head is read in pairs");

__device__ __forceinline__ float warp_largest(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ __forceinline__ float capped(float score) {
    if constexpr (CAP == 0) return score;
    float cap = __uint_as_float(CAP);
    return cap * tanhf(score * (1.0f / cap));
}

// what other blocks wrote: not from L1, where lines may be older
__device__ __forceinline__ float far(const float* at) { return *reinterpret_cast<const volatile float*>(at); }

// Without the 1, ptxas leaves 64 registers to a thread on sm_90, and spills.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend(T* att, T* cache, float* parts, const T* qkv, const float* table, const int* positions, int length, int window,
           float scale) {
    extern __shared__ __align__(16) u8 memory[];
    T* rows = reinterpret_cast<T*>(memory);  // keys, then values
    float* q = reinterpret_cast<float*>(memory + 2 * KEYS * PITCH * sizeof(T));
    float *p = q + GROUP * HD, *most = p + GROUP * KEYS, *sums = most + GROUP;
    u32& before = *reinterpret_cast<u32*>(sums + GROUP);
    int piece = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    i64 sequence = blockIdx.z;
    int last = positions[sequence], first = max(0, last + 1 - window), begin = piece * KEYS;
    int low = max(first - begin, 0), high = min(last + 1 - begin, KEYS);  // the keys of the piece that are seen
    if (low >= high) return;
    int own = last - begin, stored = min(high, own);  // the token's own key is not in the cache yet

    let_next_begin();
    Pack<T, N> read[LOADS];
    T* place = cache + (sequence * length + begin) * KEPT + head * HD;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread, row = at / PER_KEY, key = row % KEYS, value = row / KEYS;
        if (key >= low && key < stored && value < 2)
            read[i].template load_early<true>(place + static_cast<i64>(key) * KEPT + value * KV_HEADS * HD + at % PER_KEY * N);
    }
    const float* angles = table + static_cast<i64>(last) * HD;
    if (thread * 32 < HD) expect_line(angles + thread * 32);
    await_previous();
    const T* token = qkv + sequence * (HEADS * HD + KEPT);
    for (int i = thread; i < GROUP * HALF; i += THREADS) {
        int at = i / HALF * HD + i % HALF;
        float a = to_float(token[head * GROUP * HD + at]), b = to_float(token[head * GROUP * HD + at + HALF]);
        float c = angles[i % HALF], s = angles[HALF + i % HALF];
        q[at] = (a * c - b * s) * scale, q[at + HALF] = (b * c + a * s) * scale;
    }
    if (own < KEYS) {
        const T *k = token + (HEADS + head) * HD, *v = k + KV_HEADS * HD;
        T *key_row = place + static_cast<i64>(own) * KEPT, *value_row = key_row + KV_HEADS * HD;
        for (int i = THREADS - 1 - thread; i < HALF; i += THREADS) {  // threads that have fewer queries
            float a = to_float(k[i]), b = to_float(k[i + HALF]), c = angles[i], s = angles[HALF + i];
            key_row[i] = rows[own * PITCH + i] = narrow<T>(a * c - b * s);
            key_row[i + HALF] = rows[own * PITCH + i + HALF] = narrow<T>(b * c + a * s);
            value_row[i] = rows[(KEYS + own) * PITCH + i] = v[i];
            value_row[i + HALF] = rows[(KEYS + own) * PITCH + i + HALF] = v[i + HALF];
        }
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread, row = at / PER_KEY, key = row % KEYS, value = row / KEYS;
        if (key >= low && key < stored && value < 2) {
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
                    float query[N];
                    load(q + of * HD + c, query);
#pragma unroll
                    for (int j = 0; j < N; j++) score[i] = fmaf(query[j], k[j], score[i]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < SCORED; i++)
        if (side + i * SIDES < GROUP) p[(side + i * SIDES) * KEYS + key] = capped(score[i]);
    __syncthreads();

    int pieces = last / KEYS - first / KEYS + 1;
    i64 at = sequence * KV_HEADS + head;
    float* part = parts + (at * gridDim.x + piece) * PART;
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
    if (room < ROOMS) {
        float out[SUMMED][2] = {};
#pragma unroll 8
        for (int i = low; i < high; i++) {
            const T* v = rows + (KEYS + i) * PITCH + column;
            float a = to_float(v[0]), b = to_float(v[1]);
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

    __threadfence();
    __syncthreads();
    if (thread == 0) before = atomicInc(&arrived[at], pieces - 1);
    __syncthreads();
    if (before != pieces - 1) return;
    __threadfence();
    const float* from = parts + (at * gridDim.x + first / KEYS) * PART;
    for (int of = warp; of < GROUP; of += WARPS) {
        float largest = -3.0e38f, sum = 0;
        for (int i = lane; i < pieces; i += 32) {
            const float* one = from + static_cast<i64>(i) * PART + GROUP * HD + of;
            float here = far(one), more = far(one + GROUP), most_yet = fmaxf(largest, here);
            sum = sum * expf(largest - most_yet) + more * expf(here - most_yet);
            largest = most_yet;
        }
        float top = warp_largest(largest);
        sum = warp_sum(sum * expf(largest - top));
        if (lane == 0) most[of] = top, sums[of] = sum;
    }
    __syncthreads();
    for (int i = 2 * thread; i < GROUP * HD; i += 2 * THREADS) {
        int of = i / HD;
        float out[2] = {};
        for (int begin = 0; begin < pieces; begin += AT_ONCE) {
            float value[AT_ONCE][2], largest[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const float* one = from + static_cast<i64>(min(begin + j, pieces - 1)) * PART;
                value[j][0] = far(one + i), value[j][1] = far(one + i + 1), largest[j] = far(one + GROUP * HD + of);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                float weight = begin + j < pieces ? expf(largest[j] - most[of]) : 0.0f;
                out[0] = fmaf(weight, value[j][0], out[0]), out[1] = fmaf(weight, value[j][1], out[1]);
            }
        }
        T* to = att + (sequence * HEADS + head * GROUP) * HD + i;
        to[0] = narrow<T>(out[0] / sums[of]), to[1] = narrow<T>(out[1] / sums[of]);
    }
}
