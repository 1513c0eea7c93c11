// One output stored in all forms that somebody reads, in the pass that computes it.
//
// FORMS says which: the value; a bf16 copy of an f32 value; fp8 bytes as rows; fp8 bytes transposed; f32 sums over each
// 256 rows; and the largest magnitude for delayed scaling. Every form is made from the value rounded to its own dtype T,
// so that a copy made now and one made later have the same bits. E4M3 (1 or 0) says which fp8 format.
// fp8 is sat(x * (1 / scale)), nearest even; NaN stays NaN.

constexpr int VALUE = 1, COPY = 2, ROW = 4, COL = 8, SUMS = 16, AMAX = 32;
constexpr int SUMS_ROWS = 256;  // rows of one partial column sum (COLSUM_ROWS in llmq/tensor.py)

template <typename T>
struct Output {
    T* value;           // (rows, columns)
    bf16* copy;         // (rows, columns)
    u8* row;            // (rows, columns)
    u8* col;            // (columns, rows)
    float* sums;        // (ceil(rows / 256), columns)
    const float* scale; // (1,)
    u32* amax;          // (1,) the bits of a float >= 0, whose order is that of integers; NaN is the largest
};

#define OUTPUT_PARAMETERS(T, name)                                                                       \
    T *name##_value, bf16 *name##_copy, u8 *name##_row, u8 *name##_col, float *name##_sums, const float *name##_scale, \
        u32 *name##_amax
#define OUTPUT(T, name) \
    Output<T> { name##_value, name##_copy, name##_row, name##_col, name##_sums, name##_scale, name##_amax }

// amax / limit where amax is finite and not 0, and then at least the smallest normal number (its reciprocal is finite)
__device__ __forceinline__ float scale_of(float amax, float limit, float otherwise) {
    return amax > 0 && isfinite(amax) ? fmaxf(amax / limit, 0x1p-126f) : otherwise;
}

// bytes of x * inverse in fp8, two at a time: x in the low byte, y in the high one
template <bool E4M3>
__device__ __forceinline__ u32 fp8_pair(float x, float y) {
    u16 pair;
#if __CUDA_ARCH__ >= 890
    if constexpr (E4M3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
#else
    constexpr int DROPPED = E4M3 ? 20 : 21, BIAS = E4M3 ? (127 - 7) << 3 : (127 - 15) << 2;
    constexpr float LIMIT = E4M3 ? 448.0f : 57344.0f, NORMAL = E4M3 ? 0x1p-6f : 0x1p-14f;
    constexpr float UNITS = E4M3 ? 0x1p9f : 0x1p16f;  // 1 / the smallest subnormal number
    u32 bytes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float v = i ? y : x, a = fminf(fabsf(v), LIMIT);
        u32 bits = __float_as_uint(a), magnitude;
        if (a < NORMAL)
            magnitude = static_cast<u32>(__float2int_rn(a * UNITS));
        else
            magnitude = ((bits + (1u << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED) - BIAS;
        bytes[i] = v != v ? 0x7f : magnitude | (__float_as_uint(v) >> 24 & 0x80);
    }
    pair = static_cast<u16>(bytes[0] | bytes[1] << 8);
#endif
    return pair;
}

template <bool E4M3, int N>
__device__ __forceinline__ void fp8_words(const float (&v)[N], float inverse, u32 (&words)[(N + 3) / 4]) {
#pragma unroll
    for (int i = 0; i < (N + 3) / 4; i++) {
        words[i] = fp8_pair<E4M3>(__fmul_rn(v[4 * i], inverse), __fmul_rn(v[4 * i + 1], inverse));
        if (4 * i + 2 < N)
            words[i] |= fp8_pair<E4M3>(__fmul_rn(v[4 * i + 2], inverse), __fmul_rn(v[4 * i + 3], inverse)) << 16;
    }
}

template <int N>
__device__ __forceinline__ void store_bytes(u8* to, const u32 (&words)[(N + 3) / 4]) {
    if constexpr (N == 2) {
        *reinterpret_cast<u16*>(to) = static_cast<u16>(words[0]);
    } else if constexpr (N == 8) {
        *reinterpret_cast<Words<2>*>(to) = Words<2>{words[0], words[1]};
    } else {
#pragma unroll
        for (int i = 0; i < N / 4; i++) reinterpret_cast<u32*>(to)[i] = words[i];
    }
}

// What one thread carries while it writes an output: the reciprocal of the scale and the largest magnitude so far.
template <typename T, int FORMS, bool E4M3>
struct Sink {
    Output<T> out;
    float inverse;
    u32 largest;

    __device__ __forceinline__ Sink(const Output<T>& output) : out(output), inverse(1.0f), largest(0) {
        if constexpr ((FORMS & (ROW | COL)) != 0) inverse = __frcp_rn(*out.scale);
    }

    // Stores v at `index` (of the first, in elements); v becomes the value as rounded. `tile` is where the bytes of the
    // transposed form wait in shared memory, 4-byte aligned.
    template <int N>
    __device__ __forceinline__ void put(i64 index, float (&v)[N], u8* tile) {
        Pack<T, N> pack;
        pack.set(v);
        pack.get(v);
        if constexpr ((FORMS & VALUE) != 0) pack.store(out.value + index);
        if constexpr ((FORMS & COPY) != 0) store(out.copy + index, v);
        if constexpr ((FORMS & AMAX) != 0) {
#pragma unroll
            for (int i = 0; i < N; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
        }
        if constexpr ((FORMS & (ROW | COL)) != 0) {
            u32 words[(N + 3) / 4];
            fp8_words<E4M3>(v, inverse, words);
            if constexpr ((FORMS & ROW) != 0) store_bytes<N>(out.row + index, words);
            if constexpr ((FORMS & COL) != 0) {
                if constexpr (N == 2) {
                    *reinterpret_cast<u16*>(tile) = static_cast<u16>(words[0]);
                } else {
#pragma unroll
                    for (int i = 0; i < N / 4; i++) reinterpret_cast<u32*>(tile)[i] = words[i];
                }
            }
        }
    }

    // after the last put; every lane of the warp takes part
    __device__ __forceinline__ void finish() {
        if constexpr ((FORMS & AMAX) != 0) {
            largest = warp_max(largest);
            if (threadIdx.x % 32 == 0 && largest > 0) atomicMax(out.amax, largest);
        }
    }
};

// Bytes between rows of a tile in shared memory: an odd number of words, so that 16 rows and 4 columns lie in distinct
// banks when columns are read.
__host__ __device__ constexpr int tile_pitch(int columns) { return (columns + 7) / 8 * 8 + 4; }

// Writes a tile of fp8 bytes [ROWS][pitch] transposed: its columns from 4 * i on are those of the output from place(4 * i)
// on, rows begin at `first_row` of `num_rows`. ROWS is a multiple of 16. All THREADS of the block call it, with barriers
// around. ROWS / 16 neighbours write one run of ROWS bytes.
template <int ROWS, int THREADS, typename Place>
__device__ __forceinline__ void write_columns(const u8* tile, int pitch, u8* col, int columns, Place place, i64 first_row,
                                              i64 num_rows) {
    constexpr int PARTS = ROWS / 16;
    for (int task = threadIdx.x; task < (columns + 3) / 4 * PARTS; task += THREADS) {
        int part = task % PARTS, c = task / PARTS * 4;
        i64 row = first_row + part * 16;
        if (row >= num_rows) continue;
        i64 first_column = place(c);
        u32 out[4][4];  // [column][4 rows each]
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* from = tile + (part * 16 + i * 4) * pitch + c;
            u32 r0 = *reinterpret_cast<const u32*>(from), r1 = *reinterpret_cast<const u32*>(from + pitch);
            u32 r2 = *reinterpret_cast<const u32*>(from + 2 * pitch), r3 = *reinterpret_cast<const u32*>(from + 3 * pitch);
            u32 a = __byte_perm(r0, r1, 0x5140), b = __byte_perm(r2, r3, 0x5140);
            u32 d = __byte_perm(r0, r1, 0x7362), e = __byte_perm(r2, r3, 0x7362);
            out[0][i] = __byte_perm(a, b, 0x5410);
            out[1][i] = __byte_perm(a, b, 0x7632);
            out[2][i] = __byte_perm(d, e, 0x5410);
            out[3][i] = __byte_perm(d, e, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (c + j >= columns) break;
            u8* to = col + (first_column + j) * num_rows + row;
            if (num_rows % 16 == 0) {
                *reinterpret_cast<Words<4>*>(to) = Words<4>{out[j][0], out[j][1], out[j][2], out[j][3]};
            } else {
#pragma unroll
                for (int i = 0; i < 16; i++)
                    if (row + i < num_rows) to[i] = static_cast<u8>(out[j][i / 4] >> (i % 4 * 8));
            }
        }
    }
}

// Sums of the block's rows by column: each of WARPS warps holds those of its rows, N columns to a lane, and they are added
// in the order of warps. `shared` is [WARPS][32 * N]; `to` the first column's place, of `columns` that exist.
template <int WARPS, int N>
__device__ __forceinline__ void store_sums(const float (&sums)[N], float* to, int columns, float* shared) {
    __syncthreads();
    store(shared + threadIdx.x * N, sums);
    __syncthreads();
    for (int c = threadIdx.x; c < 32 * N && c < columns; c += WARPS * 32) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared[w * 32 * N + c];
        to[c] = total;
    }
}

// Elementwise ops run over tiles of rows and SPAN columns: a lane owns N columns, a warp every eighth row. A tile that is
// written transposed has 64 rows, so that runs of the transposed form are 64 bytes.
constexpr int TILE_ROWS = (FORMS & COL) ? 64 : 32, TILE_WARPS = 8, TILE_THREADS = 32 * TILE_WARPS;
