// Causal attention in f32 with grouped queries and an optional window: att = softmax(scale * q k^T) v, and its gradient.
//
// There to check the rest of a model exactly, not to be fast: bf16 attention is cuDNN's, but with a soft-cap, where s =
// scale * q k^T becomes CAP * tanh(s / CAP): that is computed here in f32, of bf16 too. A block owns 16 rows (queries, or
// keys for their gradient) of one head, a warp 4 of them; the other side passes through shared memory in tiles of 32, one
// to a lane for the scores, then each lane sums its own columns of the result. Every sum runs in a fixed order, in plain f32.
// Query i sees keys j with i - window < j <= i. q, k and v are views of one packed row of (GROUP + 2) * KV_HEADS heads.
//
// PACKED: borders (B, docs + 1) make a row up to `docs` documents, cut at `longest` tokens, that do not see each other, and
// lse is (B, T, HEADS) instead of (B, HEADS, T). A constant, since the look-ups would cost the dense kernels registers.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (float or bf16), HD (head_dim, up to 256: 99 KiB of shared memory), GROUP (query heads per key head),
// KV_HEADS, PACKED, CAP (the bits of the f32; 0: none)

#include "common.cuh"
#include "constants"

constexpr int ROWS = 16, TILE = 32, WARPS = 4, PER_WARP = ROWS / WARPS, THREADS = 32 * WARPS;
constexpr int PITCH = HD + 1;  // lanes read one column of TILE rows: an odd stride keeps them in distinct banks
constexpr int COLUMNS = (HD + 31) / 32;  // of a lane
constexpr float LOWEST = -3.0e38f;  // below every score
constexpr int HEADS = GROUP * KV_HEADS, WIDTH = (HEADS + 2 * KV_HEADS) * HD;

struct Document {
    int first, end;
};

// the document of token i: borders ascend from 0 and end with `length`, so row[low] <= i < row[high] holds throughout
__device__ __forceinline__ Document document(const int* borders, int docs, int longest, i64 batch, int i, int length) {
    if (!PACKED) return {0, length};
    const int* row = borders + batch * (docs + 1);
    int low = 0, high = docs;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (row[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    int first = row[low] + (i - row[low]) / longest * longest;
    return {first, min(row[high], first + longest)};
}

__device__ __forceinline__ i64 lse_cell(i64 batch, int head, int i, int length) {
    return PACKED ? (batch * length + i) * HEADS + head : (batch * HEADS + head) * length + i;
}

__device__ __forceinline__ float capped(float score) {
    if constexpr (CAP == 0) return score;
    float cap = __uint_as_float(CAP);
    return cap * tanhf(score * (1.0f / cap));
}

// d_score of the score before the cap, from that of a capped one
__device__ __forceinline__ float uncapped(float d_score, float score) {
    if constexpr (CAP == 0) return d_score;
    float t = score * (1.0f / __uint_as_float(CAP));
    return d_score * (1.0f - t * t);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// `count` rows of HD numbers, `width` apart in memory and `pitch` in shared memory, from row `first`; zero past `length`
__device__ __forceinline__ void load_rows(float* shared, int pitch, const T* from, int width, int first, int count,
                                          int length) {
    for (int at = threadIdx.x; at < count * HD; at += THREADS) {
        int row = at / HD, column = at % HD;
        shared[row * pitch + column] =
            first + row < length ? to_float(from[static_cast<i64>(first + row) * width + column]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float* x, const float* y) {
    float sum = 0;
#pragma unroll 16
    for (int d = 0; d < HD; d++) sum += x[d] * y[d];
    return sum;
}

// sums[c] += the sum over lanes of weight * that lane's row of `tile`, at this lane's columns
__device__ __forceinline__ void add_rows(float (&sums)[COLUMNS], float weight, const float* tile) {
#pragma unroll 8
    for (int j = 0; j < TILE; j++) {
        float w = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int d = threadIdx.x % 32 + 32 * c;
            if (d < HD) sums[c] += w * tile[j * PITCH + d];
        }
    }
}

__device__ __forceinline__ void store_row(T* to, const float (&sums)[COLUMNS], float factor) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        int d = threadIdx.x % 32 + 32 * c;
        if (d < HD) to[d] = narrow<T>(sums[c] * factor);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_forward(T* att, float* lse, const T* qkv, const int* borders, int docs, int longest,
                      int length, int window, float scale) {
    extern __shared__ float shared[];
    float *queries = shared, *keys = shared + 2 * ROWS * HD, *values = keys + TILE * PITCH;
    int first = blockIdx.x * ROWS, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 batch = blockIdx.z;
    const T* packed = qkv + batch * length * WIDTH;
    const T* k = packed + (HEADS + head / GROUP) * HD;
    load_rows(queries, HD, packed + head * HD, WIDTH, first, ROWS, length);
    float top[PER_WARP], total[PER_WARP], out[PER_WARP][COLUMNS] = {};
    int least[PER_WARP];  // key that a row sees
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int i = min(first + warp * PER_WARP + r, length - 1);
        least[r] = document(borders, docs, longest, batch, i, length).first;
        top[r] = LOWEST, total[r] = 0;
    }
    int low = max(document(borders, docs, longest, batch, first, length).first, first - window + 1);
    for (int start = low / TILE * TILE; start < min(first + ROWS, length); start += TILE) {
        __syncthreads();
        load_rows(keys, PITCH, k, WIDTH, start, TILE, length);
        load_rows(values, PITCH, k + KV_HEADS * HD, WIDTH, start, TILE, length);
        __syncthreads();
        int j = start + lane;
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            int row = warp * PER_WARP + r, i = first + row;
            bool seen = i < length && j <= i && j > i - window && (!PACKED || j >= least[r]);
            float score = seen ? capped(scale * dot(queries + row * HD, keys + lane * PITCH)) : LOWEST;
            float above = fmaxf(top[r], warp_max(score));
            if (above == LOWEST) continue;  // no key of this tile, nor any before, is seen; the same in all lanes
            float keep = expf(top[r] - above), p = seen ? expf(score - above) : 0.0f;
            total[r] = total[r] * keep + warp_sum(p);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) out[r][c] *= keep;
            add_rows(out[r], p, values);
            top[r] = above;
        }
    }
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int i = first + warp * PER_WARP + r;
        if (i >= length) continue;
        if (att) store_row(att + ((batch * length + i) * HEADS + head) * HD, out[r], 1.0f / total[r]);
        if (lse && lane == 0) lse[lse_cell(batch, head, i, length)] = top[r] + logf(total[r]);
    }
}

// d_q, and dots (B, HEADS, length) = sum of d_att * att over a head, which attention_backward_kv reads
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_q(T* d_qkv, const T* d_att, const T* qkv, const T* att, const float* lse,
                         const int* borders, float* dots, int docs, int longest, int length, int window, float scale) {
    extern __shared__ float shared[];
    float *queries = shared, *d_out = queries + ROWS * HD, *keys = shared + 2 * ROWS * HD, *values = keys + TILE * PITCH;
    int first = blockIdx.x * ROWS, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 batch = blockIdx.z;
    const T* packed = qkv + batch * length * WIDTH;
    const T* k = packed + (HEADS + head / GROUP) * HD;
    load_rows(queries, HD, packed + head * HD, WIDTH, first, ROWS, length);
    load_rows(d_out, HD, d_att + (batch * length * HEADS + head) * HD, HEADS * HD, first, ROWS, length);
    __syncthreads();
    float sums[PER_WARP], norm[PER_WARP], d_q[PER_WARP][COLUMNS] = {};
    int least[PER_WARP];
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int row = warp * PER_WARP + r, i = min(first + row, length - 1);
        const T* out = att + ((batch * length + i) * HEADS + head) * HD;
        float sum = 0;
        for (int d = lane; d < HD; d += 32) sum += d_out[row * HD + d] * to_float(out[d]);
        sums[r] = warp_sum(sum);
        norm[r] = lse[lse_cell(batch, head, i, length)];
        least[r] = document(borders, docs, longest, batch, i, length).first;
        if (lane == 0 && first + row < length) dots[(batch * HEADS + head) * length + i] = sums[r];
    }
    int low = max(document(borders, docs, longest, batch, first, length).first, first - window + 1);
    for (int start = low / TILE * TILE; start < min(first + ROWS, length); start += TILE) {
        __syncthreads();
        load_rows(keys, PITCH, k, WIDTH, start, TILE, length);
        load_rows(values, PITCH, k + KV_HEADS * HD, WIDTH, start, TILE, length);
        __syncthreads();
        int j = start + lane;
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            int row = warp * PER_WARP + r, i = first + row;
            bool seen = i < length && j <= i && j > i - window && (!PACKED || j >= least[r]);
            float score = 0, p = 0;
            if (seen) score = capped(scale * dot(queries + row * HD, keys + lane * PITCH)), p = expf(score - norm[r]);
            float d_p = dot(d_out + row * HD, values + lane * PITCH);
            add_rows(d_q[r], uncapped(p * (d_p - sums[r]), score), keys);
        }
    }
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int i = first + warp * PER_WARP + r;
        if (i < length) store_row(d_qkv + (batch * length + i) * WIDTH + head * HD, d_q[r], scale);
    }
}

// d_k and d_v, summed over the query heads of the group in order
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_kv(T* d_qkv, const T* d_att, const T* qkv, const float* lse, const int* borders,
                          const float* dots, int docs, int longest, int length, int window, float scale) {
    extern __shared__ float shared[];
    float *keys = shared, *values = keys + ROWS * HD, *queries = shared + 2 * ROWS * HD, *d_out = queries + TILE * PITCH;
    int first = blockIdx.x * ROWS, kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 batch = blockIdx.z;
    const T* packed = qkv + batch * length * WIDTH;
    load_rows(keys, HD, packed + (HEADS + kv_head) * HD, WIDTH, first, ROWS, length);
    load_rows(values, HD, packed + (HEADS + KV_HEADS + kv_head) * HD, WIDTH, first, ROWS, length);
    float d_k[PER_WARP][COLUMNS] = {}, d_v[PER_WARP][COLUMNS] = {};
    int most[PER_WARP];  // queries see a row's key up to this one
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int j = min(first + warp * PER_WARP + r, length - 1);
        most[r] = document(borders, docs, longest, batch, j, length).end - 1;
    }
    int last = min(first + ROWS, length) - 1;
    int end = min(document(borders, docs, longest, batch, last, length).end, last + window);
    for (int head = kv_head * GROUP; head < (kv_head + 1) * GROUP; head++) {
        for (int start = first / TILE * TILE; start < end; start += TILE) {
            __syncthreads();
            load_rows(queries, PITCH, packed + head * HD, WIDTH, start, TILE, length);
            load_rows(d_out, PITCH, d_att + (batch * length * HEADS + head) * HD, HEADS * HD, start, TILE, length);
            __syncthreads();
            int i = start + lane;
            float norm = lse[lse_cell(batch, head, min(i, length - 1), length)];
            float sum = dots[(batch * HEADS + head) * length + min(i, length - 1)];
#pragma unroll
            for (int r = 0; r < PER_WARP; r++) {
                int row = warp * PER_WARP + r, j = first + row;
                bool seen = i < length && j <= i && j > i - window && (!PACKED || i <= most[r]);
                float score = 0, p = 0;
                if (seen) score = capped(scale * dot(keys + row * HD, queries + lane * PITCH)), p = expf(score - norm);
                float d_p = dot(values + row * HD, d_out + lane * PITCH);
                add_rows(d_v[r], p, d_out);
                add_rows(d_k[r], uncapped(p * (d_p - sum), score), queries);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int j = first + warp * PER_WARP + r;
        if (j >= length) continue;
        T* row = d_qkv + (batch * length + j) * WIDTH;
        store_row(row + (HEADS + kv_head) * HD, d_k[r], scale);
        store_row(row + (HEADS + KV_HEADS + kv_head) * HD, d_v[r], 1.0f);
    }
}
