// What frozen weights of 4 and 8 bits stand for, in every form that is read: the value, fp8 rows, fp8 columns.
//
// A block owns a tile as in cast.cu: 32 rows and 32 * N columns, or 64 rows and 128 columns to transpose; a lane owns N
// columns of two neighbouring rows at a time, all under one scale. Where 4 bits become fp8 alone, the 16 bytes that they can
// become under a scale are made once by 4 lanes, 4 each, and bytes are picked from them 4 at a time: half the instructions
// of a number by number. NF4 (llmq/few_bits.py) has its scales as bytes: the 256
// numbers that a byte stands for, a scale and a mean for each GROUP of them, the bytes. Numbers are looked up in shared
// memory, whose 16 words lie in as many banks. Not tuned: 0.5 or 1 byte read, 1 to 4 written.
//
// Architectures: 80 86 89 90 100 120
// Constants: T (dtype of the value), K (columns), C (of the tiles' matrix: K, or any that divides the whole where blocks
// go by flat numbers), N, FORMS, E4M3, FORMAT (0: NF4, 1: MXFP4, 2: int8), GROUP

#include "common.cuh"
#include "constants"
#include "forms.cuh"

constexpr int NF4 = 0, MXFP4 = 1, INT8 = 2, NF4_BLOCK = 64, MX_BLOCK = 32, MAP = 256;
constexpr int LANES = TILE_LANES<N>, SLOTS = TILE_SLOTS<N>, SPAN = LANES * N, ACROSS = (C + SPAN - 1) / SPAN;
constexpr int ROWS = tile_rows(64), PITCH = pair_pitch(SPAN), AT_ONCE = 2;  // pairs of rows
constexpr int BYTES = FORMAT == INT8 ? N : N / 2;  // of N numbers
constexpr int PER_SCALE = FORMAT == NF4 ? NF4_BLOCK : MX_BLOCK;
constexpr bool PICKS = FORMAT != INT8 && N == 8 && !(FORMS & VALUE) && C % PER_SCALE == 0 && K % PER_SCALE == 0;

__device__ const float NF4_LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
__device__ const float E2M1_LEVELS[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct Read {
    u32 codes[(BYTES + 3) / 4];
    float scale;
};

// the scale of the number `at`, and of those after it up to a multiple of N; bytes of NF4 begin at `first`
__device__ __forceinline__ float scale_at(const u8* scales, i64 first, i64 at) {
    if constexpr (FORMAT == NF4) {
        const float* numbers = reinterpret_cast<const float*>(scales);
        i64 block = at / NF4_BLOCK;
        const float* group = numbers + MAP + block / GROUP * 2;
        return numbers[scales[first + block]] * group[0] + group[1];
    } else if constexpr (FORMAT == MXFP4) {
        constexpr int ACROSS_ROW = (K + MX_BLOCK - 1) / MX_BLOCK;
        u32 e = scales[K % MX_BLOCK ? at / K * ACROSS_ROW + at % K / MX_BLOCK : at / MX_BLOCK];
        return __uint_as_float(e == 255 ? 0x7fc00000u : e ? e << 23 : 1u << 22);
    } else {
        return reinterpret_cast<const float*>(scales)[at / K];
    }
}

__device__ __forceinline__ Read read_at(const u8* x, const u8* scales, i64 first, i64 at) {
    Read read;
    const u8* from = x + (FORMAT == INT8 ? at : at / 2);
    if constexpr (BYTES == 8) {
        Words<2> words = *reinterpret_cast<const Words<2>*>(from);
        read.codes[0] = words.at[0], read.codes[1] = words.at[1];
    } else if constexpr (BYTES == 4) {
        read.codes[0] = *reinterpret_cast<const u32*>(from);
    } else {
        read.codes[0] = BYTES == 2 ? *reinterpret_cast<const u16*>(from) : *from;
    }
    read.scale = scale_at(scales, first, at);
    return read;
}

__device__ __forceinline__ void get(const Read& read, const float* levels, float (&v)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        if constexpr (FORMAT == INT8) {
            v[j] = static_cast<float>(static_cast<signed char>(read.codes[j / 4] >> 8 * (j % 4))) * read.scale;
        } else {
            int place = FORMAT == NF4 ? j ^ 1 : j;  // NF4 has the first of two in the upper half of a byte
            v[j] = levels[read.codes[j / 8] >> 4 * (place % 8) & 15] * read.scale;
        }
    }
}

// the bytes of a table of 16 that 4 codes of 4 bits each say
__device__ __forceinline__ u32 pick(u32 codes, const u32 (&table)[4]) {
    u32 low = codes & 0x7777u, is_high = __byte_perm(0xff00u, 0, codes >> 3 & 0x1111u);
    return (__byte_perm(table[0], table[1], low) & ~is_high) | (__byte_perm(table[2], table[3], low) & is_high);
}

// fp8 bytes of 8 numbers, of which those of 4 lanes side by side have one scale; all of the warp take part
__device__ __forceinline__ void picked(const Read& read, const float* levels, float inverse, u32 (&bytes)[(N + 3) / 4]) {
    if constexpr (PICKS) {
        u32 lane = threadIdx.x % 32, table[4], mine[1];
        float v[4];
        Pack<T, 4> pack;
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = levels[lane % 4 * 4 + j] * read.scale;
        pack.set(v);
        pack.get(v);
        fp8_words<E4M3>(v, inverse, mine);
#pragma unroll
        for (int j = 0; j < 4; j++) table[j] = __shfl_sync(0xffffffffu, mine[0], lane / 4 * 4 + j);
        u32 codes = read.codes[0];
        if (FORMAT == NF4) codes = (codes & 0x0f0f0f0fu) << 4 | (codes >> 4 & 0x0f0f0f0fu);
        bytes[0] = pick(codes & 0xffffu, table), bytes[1] = pick(codes >> 16, table);
    }
}

// out, in its forms, (rows, C) <- x, scales, of which those of NF4 have their bytes from `first` on
extern "C" __global__ void __launch_bounds__(TILE_THREADS, (FORMS & COL) ? 4 : 1)
    unpack(OUTPUT_PARAMETERS(T, out), const u8* x, const u8* scales, i64 first, i64 rows, i64 tall) {
    __shared__ __align__(128) u8 tile[pair_bytes(ROWS, SPAN)];
    __shared__ float levels[16];
    if (threadIdx.x < 16) levels[threadIdx.x] = FORMAT == NF4 ? NF4_LEVELS[threadIdx.x] : E2M1_LEVELS[threadIdx.x];
    __syncthreads();
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    int first_column = blockIdx.x % ACROSS * SPAN, column = first_column + lane * N;
    i64 block_row = static_cast<i64>(blockIdx.x / ACROSS) * ROWS, begin = block_row * C + column;
    int block_rows = static_cast<int>(min(rows - block_row, static_cast<i64>(ROWS)));
    Sink<T, FORMS, E4M3> sink(OUTPUT(T, out));
    sink.begin_at(begin);
#pragma unroll 1
    for (int part = slot; part < ROWS / 2; part += AT_ONCE * SLOTS) {
        int left = column < C ? block_rows - 2 * part : 0;  // rows from here on
        Read read[AT_ONCE][2];
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) {
            int row = i / 2 * 2 * SLOTS + i % 2;
            read[i / 2][i % 2] = {};
            if (row < left) read[i / 2][i % 2] = read_at(x, scales, first, begin + (2 * part + row) * C);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            u32 bytes[2][(N + 3) / 4] = {};
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                int row = 2 * i * SLOTS + odd;
                if constexpr (PICKS) {
                    picked(read[i][odd], levels, sink.inverse, bytes[odd]);
                    if ((FORMS & ROW) && row < left) store_bytes<N>(sink.out.row + (2 * part + row) * C, bytes[odd]);
                } else if (row < left) {
                    float v[N];
                    get(read[i][odd], levels, v);
                    sink.put((2 * part + row) * C, v, bytes[odd]);
                }
            }
            store_pair<N>(tile + pair_at(part + i * SLOTS, lane * N, PITCH), bytes[0], bytes[1]);
        }
    }
    if constexpr ((FORMS & COL) != 0) {
        __syncthreads();
        write_transposed<ROWS, TILE_THREADS>(
            tile, PITCH, out_col, SPAN, [=](int c) { return first_column + c < C ? first_column + c : -1; }, block_row, rows,
            tall);
    }
}

// amax (1,), zero before, takes the bits of the largest magnitude of what x (count numbers) stands for in T
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    held_amax(u32* amax, const u8* x, const u8* scales, i64 first, i64 count) {
    __shared__ float levels[16];
    if (threadIdx.x < 16) levels[threadIdx.x] = FORMAT == NF4 ? NF4_LEVELS[threadIdx.x] : E2M1_LEVELS[threadIdx.x];
    __syncthreads();
    i64 step = static_cast<i64>(gridDim.x) * TILE_THREADS * N;
    u32 most = 0;
#pragma unroll 4
    for (i64 at = (static_cast<i64>(blockIdx.x) * TILE_THREADS + threadIdx.x) * N; at < count; at += step) {
        float v[N];
        get(read_at(x, scales, first, at), levels, v);
#pragma unroll
        for (int j = 0; j < N; j++) most = max(most, __float_as_uint(v[j]) & 0x7fffffffu);
    }
    most = __float_as_uint(to_float(narrow<T>(__uint_as_float(warp_max(most)))));
    if (threadIdx.x % 32 == 0 && most > *reinterpret_cast<volatile u32*>(amax)) atomicMax(amax, most);
}
