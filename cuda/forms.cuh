// One output stored in all forms that are read, in the pass that computes it.
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

// N bytes in global memory
template <int N>
__device__ __forceinline__ void store_bytes(u8* to, const u32 (&words)[(N + 3) / 4]) {
    if constexpr (N == 2)
        *reinterpret_cast<u16*>(to) = static_cast<u16>(words[0]);
    else
        store_words(to, words);
}

// N bytes in shared memory
template <int N>
__device__ __forceinline__ void store_tile(u8* to, const u32 (&words)[(N + 3) / 4]) {
    if constexpr (N == 2)
        *reinterpret_cast<u16*>(to) = static_cast<u16>(words[0]);
    else if constexpr (N == 8)
        *reinterpret_cast<u64*>(to) = static_cast<u64>(words[1]) << 32 | words[0];
    else
        *reinterpret_cast<u32*>(to) = words[0];
}

// What one thread carries while it writes an output: the reciprocal of the scale and the largest magnitude so far.
template <typename T, int FORMS, bool E4M3>
struct Sink {
    // of bf16, the largest magnitudes of the even and the odd numbers, with any signs: one instruction for two of them
#if __CUDA_ARCH__ >= 860
    static constexpr bool IN_PAIRS = sizeof(T) == 2;
#else
    static constexpr bool IN_PAIRS = false;
#endif
    Output<T> out;
    float inverse;
    u32 largest;

    __device__ __forceinline__ Sink(const Output<T>& output) : out(output), inverse(1.0f), largest(0) {
        if constexpr ((FORMS & (ROW | COL)) != 0) inverse = __frcp_rn(*out.scale);
    }

    // From now on indices count from `first`: those within a block fit 32 bits.
    __device__ __forceinline__ void begin_at(i64 first) { out.value += first, out.copy += first, out.row += first; }

    // Stores v at `index` (of the first, in elements); v becomes the value as rounded, `bytes` its fp8 bytes where there are
    // any.
    template <int N>
    __device__ __forceinline__ void put(i64 index, float (&v)[N], u32 (&bytes)[(N + 3) / 4]) {
        Pack<T, N> pack;
        pack.set(v);
        pack.get(v);
        if constexpr ((FORMS & VALUE) != 0) pack.store(out.value + index);
        if constexpr ((FORMS & COPY) != 0) store(out.copy + index, v);
        if constexpr ((FORMS & AMAX) != 0) {
            if constexpr (IN_PAIRS) {
#pragma unroll
                for (int i = 0; i < pack.WORDS; i++)
                    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(largest) : "r"(pack.at[i]));
            } else {
#pragma unroll
                for (int i = 0; i < N; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
            }
        }
        if constexpr ((FORMS & (ROW | COL)) != 0) {
            fp8_words<E4M3>(v, inverse, bytes);
            if constexpr ((FORMS & ROW) != 0) store_bytes<N>(out.row + index, bytes);
        }
    }

    // The same, the bytes of the transposed form into a tile (tile_at), aligned to the access.
    template <int N>
    __device__ __forceinline__ void put(i64 index, float (&v)[N], u8* tile) {
        u32 bytes[(N + 3) / 4];
        put(index, v, bytes);
        if constexpr ((FORMS & COL) != 0) store_tile<N>(tile, bytes);
    }

    // After the last put; every thread of the block takes part. Atomics on one address take turns of 1.6 ns (one per
    // warp was half of a cast's time): a block makes one, and none if its largest value is no new maximum.
    __device__ __forceinline__ void finish() {
        if constexpr ((FORMS & AMAX) != 0) {
            __shared__ u32 warps[32];
            if constexpr (IN_PAIRS) largest = max(largest << 16 & 0x7fff0000u, largest & 0x7fff0000u);
            largest = warp_max(largest);
            if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
            __syncthreads();
            if (threadIdx.x >= 32) return;
            largest = warp_max(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0);
            if (threadIdx.x == 0 && largest > *const_cast<volatile u32*>(out.amax)) atomicMax(out.amax, largest);
        }
    }
};

// Where a thread has no two neighbouring rows at a time (norms, scales of blocks), a tile in shared memory has rows of
// 128 * n fp8 bytes, whose pieces of 16 or more change places within each 128: in rows 16 * k to 16 * k + 15 with the k-th, so
// that the threads that read one column 16 rows apart find it in distinct banks, and in row r with the one r % 4 * 32 bytes
// on, so that a warp may write short runs of neighbouring rows.
__host__ __device__ constexpr int tile_pitch(int columns) { return (columns + 127) / 128 * 128; }

template <int ROWS>
__device__ __forceinline__ int tile_at(int row, int column, int pitch) {
    constexpr int PARTS = ROWS < 16 ? 1 : ROWS / 16;
    return row * pitch + (column ^ row / 16 % PARTS * (128 / PARTS) ^ row % 4 * 32);
}

// Writes a tile of fp8 bytes [ROWS][pitch] transposed: its columns from 4 * i on are those of the output from place(4 * i)
// on (less than 0: there are none), rows begin at `first_row` of `num_rows`, of which the whole has `tall`: a multiple of 16
// only if num_rows is. ROWS is 16, 32, 64 or 128. All THREADS of the block call it, with barriers around. ROWS / 16
// neighbours write one run of ROWS bytes.
template <int ROWS, int THREADS, typename Place>
__device__ __forceinline__ void write_columns(const u8* tile, int pitch, u8* col, int columns, Place place, i64 first_row,
                                              i64 num_rows, i64 tall) {
    constexpr int PARTS = ROWS < 16 ? 1 : ROWS / 16;
#pragma unroll 1
    for (int task = threadIdx.x; task < (columns + 3) / 4 * PARTS; task += THREADS) {
        int part = task % PARTS, c = task / PARTS * 4;
        i64 row = first_row + part * 16;
        if (row >= num_rows) continue;
        i64 first_column = place(c);
        if (first_column < 0) continue;
        u32 out[4][4];  // [column][4 rows each]
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 r[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                r[j] = *reinterpret_cast<const u32*>(tile + tile_at<ROWS>(part * 16 + j, c, pitch) + 4 * i * pitch);
            u32 a = __byte_perm(r[0], r[1], 0x5140), b = __byte_perm(r[2], r[3], 0x5140);
            u32 d = __byte_perm(r[0], r[1], 0x7362), e = __byte_perm(r[2], r[3], 0x7362);
            out[0][i] = __byte_perm(a, b, 0x5410);
            out[1][i] = __byte_perm(a, b, 0x7632);
            out[2][i] = __byte_perm(d, e, 0x5410);
            out[3][i] = __byte_perm(d, e, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (c + j >= columns) break;
            u8* to = col + (first_column + j) * tall + row;
            if (tall % 16 == 0) {
                store_words(to, out[j]);
            } else {
#pragma unroll
                for (int i = 0; i < 16; i++)
                    if (row + i < num_rows) to[i] = static_cast<u8>(out[j][i / 4] >> (i % 4 * 8));
            }
        }
    }
}

// A tile of pairs: in shared memory, 128-byte aligned, the fp8 bytes of rows 2p and 2p + 1 lie side by side, column by
// column: 16 bits that `ldmatrix` can transpose. 8 columns of a pair are a unit of 16 bytes. Within each 8 units of a pair
// they change places, so that 8 pairs' units of the same columns, which `ldmatrix` reads at a time, lie in distinct banks,
// and so do the halves of two neighbouring pairs.
__host__ __device__ constexpr int pair_pitch(int columns) { return (columns + 63) / 64 * 128; }

// bytes of a tile; 4 where there is none
__host__ __device__ constexpr int pair_bytes(int rows, int columns) {
    return (FORMS & COL) ? rows / 2 * pair_pitch(columns) : 4;
}

__device__ __forceinline__ int pair_turn(int pair) { return pair % 2 * 64 | pair / 8 % 4 * 16; }

__device__ __forceinline__ int pair_at(int pair, int column, int pitch) {
    return pair * pitch + (2 * column ^ pair_turn(pair));
}

// the bytes of N columns of both rows of a pair; `to` is aligned to 2 * N bytes
template <int N>
__device__ __forceinline__ void store_pair(u8* to, const u32 (&even)[(N + 3) / 4], const u32 (&odd)[(N + 3) / 4]) {
    if constexpr ((FORMS & COL) != 0) {
        constexpr int WORDS = N / 2 < 4 ? N / 2 : 4;
        static_assert(N >= 2, "columns come in twos");
#pragma unroll
        for (int first = 0; first < N / 2; first += WORDS) {
            Words<WORDS> words;
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                int at = (first + i) / 2;
                words.at[i] = __byte_perm(even[at], odd[at], i % 2 ? 0x7362 : 0x5140);
            }
            *reinterpret_cast<Words<WORDS>*>(to + 4 * first) = words;
        }
    }
}

// 4 matrices of 8 rows of 16 bytes, transposed as 16-bit numbers: lane l gives the address of row l % 8 of matrix l / 8, and
// gets of each matrix column l / 4 of rows 2 * (l % 4) and the next.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// Writes a tile of pairs transposed: its column c is that of the output from place(c) on (less than 0: there is none), rows
// begin at `first_row` of `num_rows` < 2^32, of which the whole has `tall`: a multiple of 16 only if num_rows is. ROWS is a
// multiple of 64. All THREADS of the block call it, with barriers around. A warp takes 8 columns, 4 lanes of it write a run
// of 64 bytes of one.
template <int ROWS, int THREADS, typename Place>
__device__ __forceinline__ void write_transposed(const u8* tile, int pitch, u8* col, int columns, Place place, i64 first_row,
                                                 i64 num_rows, i64 tall) {
    static_assert(ROWS % 64 == 0, "a lane holds 16 rows, 4 of them a run");
    constexpr int HALVES = ROWS / 64, WARPS = THREADS / 32;
    int lane = threadIdx.x % 32, pair = lane / 2 % 4 * 8 + lane / 8 * 2 + lane % 2, turn = pair_turn(pair);
    int units = (columns + 7) / 8, left = static_cast<int>(min(num_rows - first_row, static_cast<i64>(ROWS))) - lane % 4 * 16;
    u32 from = static_cast<u32>(__cvta_generic_to_shared(tile)) + pair * pitch;
    col += first_row + lane % 4 * 16;
    u32 out[HALVES][4];  // 4 rows each
    auto take = [&](int unit) -> u8* {
        int c = unit * 8 + lane / 4, column = columns % 8 == 0 || c < columns ? place(c) : -1;
#pragma unroll
        for (int half = 0; half < HALVES; half++) load_transposed(out[half], from + half * 32 * pitch + (unit * 16 ^ turn));
        return column < 0 ? nullptr : col + static_cast<u64>(static_cast<u32>(column)) * static_cast<u32>(tall);
    };
    if (tall % 16 == 0) {
#pragma unroll 4
        for (int first = 0; first < units; first += WARPS) {
            int unit = first + threadIdx.x / 32;
            if (units % WARPS != 0 && unit >= units) continue;
            u8* to = take(unit);
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                if (to && half * 64 < left) store_words(to + half * 64, out[half]);
        }
    } else {
#pragma unroll 1
        for (int unit = threadIdx.x / 32; unit < units; unit += WARPS) {
            u8* to = take(unit);
#pragma unroll
            for (int i = 0; i < 16 * HALVES; i++) {
                int row = i / 16 * 64 + i % 16;
                if (to && row < left) to[row] = static_cast<u8>(out[i / 16][i % 16 / 4] >> (i % 4 * 8));
            }
        }
    }
}

template <int ROWS, int THREADS, typename Place>
__device__ __forceinline__ void write_transposed(const u8* tile, int pitch, u8* col, int columns, Place place, i64 first_row,
                                                 i64 num_rows) {
    write_transposed<ROWS, THREADS>(tile, pitch, col, columns, place, first_row, num_rows, num_rows);
}

// Elementwise ops run over tiles: a lane owns N columns, TILE_LANES of them stand side by side and TILE_SLOTS rows one
// below the other. A tile that is written transposed is 128 columns wide, so that runs of the fp8 rows are a whole line of
// the L2 cache; where column sums are wanted it is as wide, so that their order does not depend on other forms.
constexpr int TILE_THREADS = 256, TILE_WARPS = TILE_THREADS / 32;
template <int N>
constexpr int TILE_LANES = (FORMS & (COL | SUMS)) && N > 4 ? 128 / N : 32;
template <int N>
constexpr int TILE_SLOTS = TILE_THREADS / TILE_LANES<N>;
// of `transposed` rows where it is written transposed
__host__ __device__ constexpr int tile_rows(int transposed) { return (FORMS & COL) ? transposed : (FORMS & SUMS) ? 64 : 32; }

// Sums of the block's rows by column: LANES lanes side by side hold those of N columns each for the rows of their slot, and
// COUNT / N such parts one after the other. The slots of a warp are added by a butterfly, then the warps in order. `shared`
// is [TILE_WARPS][LANES * COUNT]; the c-th column of the block is to[place(c)], and none where that is less than 0.
template <int LANES, int N, int COUNT, typename Place>
__device__ __forceinline__ void store_sums(float (&sums)[COUNT], float* to, Place place, float* shared) {
    constexpr int SPAN = LANES * N, COLUMNS = LANES * COUNT;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
#pragma unroll
        for (int step = 16; step >= LANES; step /= 2) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], step);
    __syncthreads();
    if (threadIdx.x % 32 < LANES) {
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            shared[threadIdx.x / 32 * COLUMNS + j / N * SPAN + threadIdx.x % 32 * N + j % N] = sums[j];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < COLUMNS; c += TILE_THREADS) {
        int column = place(c);
        if (column < 0) continue;
        float total = 0;
#pragma unroll
        for (int w = 0; w < TILE_WARPS; w++) total += shared[w * COLUMNS + c];
        to[column] = total;
    }
}
