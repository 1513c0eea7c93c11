// fp8 copies that come with scales of their own, and those scales: one per row, per 128 numbers of a row, or per 128 x 128.
// Copies in int8 have one per row.
//
// quantize_rows: one per row, for the copy in rows. WARPS warps own a row and hold it in registers, so that it is read
// once; wider ones are read again. The amax of the whole matrix can be had by the way.
// quantize_tiles: a block of 256 threads owns 128 x 128 numbers and holds them in registers, a lane N columns. It finds the
// largest of each row, each column or the whole tile (PER), then writes the rows, and the columns through shared memory in
// runs of 128 bytes. With one scale per column those are given: column_amax and column_scale make them, in one more pass.
//
// Measured on an H200 (docs/kernels/memory-bound.md): rows 97-102% of a copy of as many bytes, blocks of 128 in both
// layouts 90-92%, tiles of a weight 89-92%; rows and columns of a weight, which read it three times, 26-49%.
//
// Architectures: 80 86 89 90 100 120
// Constants: X (dtype read), T (dtype of the value), C (columns), N, FORMS (ROW, COL), E4M3, INT8 (rows only), WARPS, PER

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int BLOCKS = 0, TILES = 1, COLUMNS = 2;  // PER: 128 numbers of a row or column, 128 x 128, a column
constexpr int SIDE = 128, THREADS = 256;
constexpr float LIMIT = INT8 ? 127.0f : E4M3 ? 448.0f : 57344.0f;

// the largest magnitude of v, as bits: NaN is the largest of all
template <int COUNT>
__device__ __forceinline__ u32 magnitude(const float (&v)[COUNT]) {
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < COUNT; j++) largest = max(largest, __float_as_uint(v[j]) & 0x7fffffffu);
    return largest;
}

__device__ __forceinline__ float scale_from(u32 amax) { return scale_of(__uint_as_float(amax), LIMIT, 1.0f); }

// N numbers as values of the output, which T rounds
__device__ __forceinline__ Pack<T, N> as_value(const Pack<X, N>& read) {
    float v[N];
    read.get(v);
    Pack<T, N> value;
    value.set(v);
    return value;
}

// bytes of v * inverse
__device__ __forceinline__ void row_words(const float (&v)[N], float inverse, u32 (&words)[(N + 3) / 4]) {
    if constexpr (INT8) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            float units = v[j] * inverse;
            int code = units != units ? 0 : __float2int_rn(fminf(fmaxf(units, -LIMIT), LIMIT));
            words[j / 4] = (j % 4 ? words[j / 4] : 0) | (code & 0xff) << j % 4 * 8;
        }
    } else {
        fp8_words<E4M3>(v, inverse, words);
    }
}

constexpr int ROW_LANES = 32 * WARPS, ROW_THREADS = ROW_LANES < THREADS ? THREADS : ROW_LANES;
constexpr int ROWS_HERE = ROW_THREADS / ROW_LANES, PACKS = C / N, EACH = (PACKS + ROW_LANES - 1) / ROW_LANES;
constexpr bool HELD = EACH <= 8;
constexpr int AT_ONCE = HELD ? EACH : 4;

// out (rows,C) bytes, scales (rows,), amax (1,) bits or null <- x (rows,C)
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    quantize_rows(u8* out, float* scales, u32* amax, const X* x, i64 rows) {
    __shared__ u32 shared[ROW_THREADS / 32];
    int lane = threadIdx.x % ROW_LANES, in_block = threadIdx.x / ROW_LANES, warp = threadIdx.x / 32;
    i64 row = static_cast<i64>(blockIdx.x) * ROWS_HERE + in_block;
    const X* from = x + row * C;
    int count = row < rows ? PACKS : 0;
    Pack<X, N> held[AT_ONCE];
    auto read = [&](int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int pack = lane + (first + i) * ROW_LANES;
            if (pack < count) held[i].load(from + pack * N);
        }
    };
    u32 seen = 0, largest = 0;  // of what is read, and of the value
#pragma unroll 1
    for (int first = 0; first < EACH; first += AT_ONCE) {
        read(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (lane + (first + i) * ROW_LANES >= count) continue;
            float v[N];
            held[i].get(v);
            seen = max(seen, magnitude(v));
            as_value(held[i]).get(v);
            largest = max(largest, magnitude(v));
        }
    }
    largest = warp_max(largest);
    if constexpr (WARPS > 1) {
        if (threadIdx.x % 32 == 0) shared[warp] = largest;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest = max(largest, shared[in_block * WARPS + w]);
    }
    float scale = scale_from(largest), inverse = __frcp_rn(scale);
    if (lane == 0 && count) scales[row] = scale;
#pragma unroll 1
    for (int first = 0; first < EACH; first += AT_ONCE) {
        if constexpr (!HELD) read(first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int pack = lane + (first + i) * ROW_LANES;
            if (pack >= count) continue;
            float v[N];
            as_value(held[i]).get(v);
            u32 words[(N + 3) / 4];
            row_words(v, inverse, words);
            store_bytes<N>(out + row * C + pack * N, words);
        }
    }
    if (amax) {
        seen = warp_max(seen);
        // most warps find a larger one there: 32768 atomics on one address would take longer than the copy
        if (threadIdx.x % 32 == 0 && seen > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, seen);
    }
}

// scale (1,) <- the largest magnitude of the whole, as `quantize_rows` found it
extern "C" __global__ void whole_scale(float* scale, const u32* amax, float limit) {
    *scale = scale_of(__uint_as_float(*amax), limit, 1.0f);
}

constexpr int ACROSS = (C + SIDE - 1) / SIDE, LANES = SIDE / N, TOGETHER = THREADS / LANES, STEPS = SIDE / TOGETHER;
constexpr int PITCH = tile_pitch(SIDE);

__device__ constexpr i64 to_4(i64 count) { return (count + 3) / 4 * 4; }

// the largest of the lanes that hold one row
__device__ __forceinline__ u32 row_max(u32 x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// row (rows,C) and col (C,rows) bytes, with their scales as scale_shape of llmq/tensor.py lays them out <- x (rows,C)
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_tiles(u8* row, float* row_scales, u8* col, float* col_scales, const X* x, i64 rows) {
    __shared__ __align__(16) u8 tile[(FORMS & COL) ? SIDE * PITCH : 4];
    __shared__ u32 largest[SIDE];    // bits, by column; [0] is that of a tile
    __shared__ float inverses[SIDE]; // of the scales of columns
    int across = blockIdx.x % ACROSS, lane = threadIdx.x % LANES;
    i64 down = blockIdx.x / ACROSS, first_row = down * SIDE;
    int first_column = across * SIDE, column = first_column + lane * N;
    Pack<X, N> read[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        i64 at = first_row + threadIdx.x / LANES + i * TOGETHER;
        if (at < rows && column < C)
            read[i].load(x + at * C + column);
        else
            read[i] = Pack<X, N>{};
    }
    if (threadIdx.x < SIDE) largest[threadIdx.x] = 0;
    __syncthreads();

    Pack<T, N> held[STEPS];
    u32 of_row[STEPS], of_column[N] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        held[i] = as_value(read[i]);
        float v[N];
        held[i].get(v);
        of_row[i] = PER == BLOCKS && (FORMS & ROW) ? row_max(magnitude(v)) : magnitude(v);
#pragma unroll
        for (int j = 0; j < N; j++) of_column[j] = max(of_column[j], __float_as_uint(v[j]) & 0x7fffffffu);
    }
    if constexpr (PER == BLOCKS && (FORMS & COL) != 0) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 both = LANES < 32 ? max(of_column[j], __shfl_xor_sync(0xffffffffu, of_column[j], LANES)) : of_column[j];
            if (threadIdx.x % 32 < LANES) atomicMax(largest + lane * N + j, both);
        }
    } else if constexpr (PER == TILES) {
        u32 all = 0;
#pragma unroll
        for (int i = 0; i < STEPS; i++) all = max(all, of_row[i]);
        all = warp_max(all);
        if (threadIdx.x % 32 == 0) atomicMax(largest, all);
    }
    __syncthreads();
    if constexpr (PER == TILES) {
        float scale = scale_from(largest[0]);
        i64 row_pitch = to_4(ACROSS), num_down = (rows + SIDE - 1) / SIDE, col_pitch = to_4(num_down);
        // the last tile of a line of scales writes what pads it to a multiple of 4
        if ((FORMS & ROW) && threadIdx.x < (across == ACROSS - 1 ? row_pitch - across : 1))
            row_scales[down * row_pitch + across + threadIdx.x] = threadIdx.x ? 1.0f : scale;
        if ((FORMS & COL) && threadIdx.x < (down == num_down - 1 ? col_pitch - down : 1))
            col_scales[across * col_pitch + down + threadIdx.x] = threadIdx.x ? 1.0f : scale;
        if (threadIdx.x < SIDE) inverses[threadIdx.x] = __frcp_rn(scale);
    } else if constexpr ((FORMS & COL) != 0) {
        int c = first_column + threadIdx.x;
        if (threadIdx.x < SIDE && c < C) {
            float scale = PER == COLUMNS ? col_scales[c] : scale_from(largest[threadIdx.x]);
            if constexpr (PER == BLOCKS) col_scales[down * C + c] = scale;
            inverses[threadIdx.x] = __frcp_rn(scale);
        }
    }
    __syncthreads();

    float by_column[N];
#pragma unroll
    for (int j = 0; j < N; j++) by_column[j] = (FORMS & COL) || PER == TILES ? inverses[lane * N + j] : 1.0f;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int in_tile = threadIdx.x / LANES + i * TOGETHER;
        i64 at = first_row + in_tile;
        float v[N];
        held[i].get(v);
        if constexpr ((FORMS & COL) != 0) {
            float units[N];
            u32 words[N / 4];
#pragma unroll
            for (int j = 0; j < N; j++) units[j] = __fmul_rn(v[j], by_column[j]);
            fp8_words<E4M3>(units, 1.0f, words);
            store_tile<N>(tile + tile_at<SIDE>(in_tile, lane * N, PITCH), words);
        }
        if constexpr ((FORMS & ROW) != 0) {
            float scale = scale_from(of_row[i]), inverse = PER == TILES ? by_column[0] : __frcp_rn(scale);
            u32 words[N / 4];
            fp8_words<E4M3>(v, inverse, words);
            if (at < rows && column < C) store_bytes<N>(row + at * C + column, words);
            if (PER == BLOCKS && lane == 0 && at < rows) row_scales[across * rows + at] = scale;
        }
    }
    if constexpr ((FORMS & COL) != 0) {
        __syncthreads();
        write_columns<SIDE, THREADS>(
            tile, PITCH, col, min(SIDE, C - first_column), [=](int c) { return first_column + c; }, first_row, rows, rows);
    }
}

// amax (C,), zero before, takes the bits of the largest value of each column of x (rows,C); a block reads 1024 rows
extern "C" __global__ void __launch_bounds__(THREADS) column_amax(u32* amax, const X* x, i64 rows) {
    __shared__ u32 largest[SIDE];
    int lane = threadIdx.x % LANES, column = blockIdx.x % ACROSS * SIDE + lane * N;
    i64 first_row = static_cast<i64>(blockIdx.x / ACROSS) * 8 * SIDE, last_row = min(rows, first_row + 8 * SIDE);
    u32 of_column[N] = {};
    if (threadIdx.x < SIDE) largest[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 4
    for (i64 at = first_row + threadIdx.x / LANES; at < last_row; at += TOGETHER) {
        if (column >= C) break;
        Pack<X, N> read;
        read.load(x + at * C + column);
        float v[N];
        as_value(read).get(v);
#pragma unroll
        for (int j = 0; j < N; j++) of_column[j] = max(of_column[j], __float_as_uint(v[j]) & 0x7fffffffu);
    }
#pragma unroll
    for (int j = 0; j < N; j++) atomicMax(largest + lane * N + j, of_column[j]);
    __syncthreads();
    int c = blockIdx.x % ACROSS * SIDE + threadIdx.x;
    if (threadIdx.x < SIDE && c < C) atomicMax(amax + c, largest[threadIdx.x]);
}

// scales (C,) <- the bits of amax, in place
extern "C" __global__ void column_scale(float* scales) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < C) scales[c] = scale_from(__float_as_uint(scales[c]));
}
