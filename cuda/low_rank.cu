// Both gradients that an adapter y += s B a takes from d_y, which is read once: d_a (M,R) = s d_y B, d_B (N,R) = s d_y^T a.
//
// A block owns TILES * 128 tokens and some of the blocks of 64 columns. It holds the sums of its tokens over all its columns
// in registers, and those of a block of columns over its tokens, and leaves both as parts, which `low_rank_sums` adds up in
// order. Tiles of d_y (128 tokens, 64 columns) come through shared memory, STAGES of them under way; tensor cores multiply.
//
// Architectures: 80 86 89 90 100 120
// Constants: G (dtype of d_B), R (16 or 32), TILES, STAGES, BLOCKS (to a multiprocessor, at least)

#include "common.cuh"
#include "constants"

constexpr int THREADS = 256, TOKENS = 128, COLUMNS = 64, PAIRS = R / 16;
constexpr int TILE_BYTES = 2 * TOKENS * COLUMNS, LOW_BYTES = 2 * TILES * TOKENS * R, UP_BYTES = 2 * COLUMNS * R;

// 16 bytes from global to shared memory, in the background; zeros where there are none
__device__ __forceinline__ void copy(u32 to, const bf16* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "n"(16),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// Where 16 bytes of a row lie in shared memory: 8 rows that are read together lie in distinct banks.
__device__ __forceinline__ int tile_at(int row, int piece) { return row * 2 * COLUMNS + (piece ^ row % 8) * 16; }
__device__ __forceinline__ int low_at(int row, int piece) { return row * 2 * R + (piece ^ row / (64 / R) % (R / 8)) * 16; }

// 4 matrices of 8 x 8 numbers, lane l having the address of row l % 8 of matrix l / 8
__device__ __forceinline__ void load_rows(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_columns(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// sums (16,8) += a (16,16) b (16,8)
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// low_parts (across,M,R), up_parts (groups of tokens,N,R) <- d_y (M,N), low (M,R), up (N,R). Blocks go by columns first.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_backward(float* low_parts, float* up_parts, const bf16* d_y, const bf16* low, const bf16* up, i64 pitch,
                      i64 low_pitch, int rows, int columns, int across, int per_block) {
    extern __shared__ __align__(128) u8 memory[];
    u32 tiles = static_cast<u32>(__cvta_generic_to_shared(memory)), lows = tiles + STAGES * TILE_BYTES;
    u32 ups = lows + LOW_BYTES;
    float* halves = reinterpret_cast<float*>(memory + STAGES * TILE_BYTES + LOW_BYTES + 2 * UP_BYTES);  // [COLUMNS][R]
    int side = blockIdx.x % across, group = blockIdx.x / across, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first_token = group * TILES * TOKENS, first_column = side * per_block * COLUMNS;
    int count = min(per_block, (columns - first_column + COLUMNS - 1) / COLUMNS);
    auto begin_reading = [&](int n) {
        if (n < count * TILES) {
            int token = first_token + n % TILES * TOKENS, column = first_column + n / TILES * COLUMNS;
            u32 to = tiles + n % STAGES * TILE_BYTES;
#pragma unroll
            for (int i = threadIdx.x; i < TILE_BYTES / 16; i += THREADS) {
                int row = i / 8, piece = i % 8;
                bool there = token + row < rows && column + piece * 8 < columns;
                copy(to + tile_at(row, piece), there ? d_y + (token + row) * pitch + column + piece * 8 : d_y, there);
            }
            if (n % TILES == 0 && threadIdx.x < UP_BYTES / 16) {
                int row = threadIdx.x / (R / 8), piece = threadIdx.x % (R / 8);
                bool there = column + row < columns;
                copy(ups + n / TILES % 2 * UP_BYTES + low_at(row, piece), there ? up + (column + row) * R + piece * 8 : up, there);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < LOW_BYTES / 16; i += THREADS) {
        int row = i / (R / 8), piece = i % (R / 8);
        bool there = first_token + row < rows;
        copy(lows + low_at(row, piece), there ? low + (first_token + row) * low_pitch + piece * 8 : low, there);
    }
#pragma unroll 1
    for (int n = 0; n < STAGES - 1; n++) begin_reading(n);
    // of 16 rows of a matrix in shared memory the one whose address this lane gives, and which 16 bytes of it: first as the
    // left factor, then as one that is transposed, or the right factor
    int own_row = lane % 8 + lane / 8 % 2 * 8, own_piece = lane / 16, turned_row = lane % 8 + lane / 16 * 8, turned = lane / 8 % 2;
    int columns_of_warp = warp % 4, tokens_of_warp = warp / 4 * (TOKENS / 2);
    float low_sums[TILES][R / 8][4] = {};
#pragma unroll 1
    for (int block = 0; block < count; block++) {
        float up_sums[R / 8][4] = {};
        u32 right[COLUMNS / 16][PAIRS][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            int n = block * TILES + tile;
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();
            begin_reading(n + STAGES - 1);
            if (tile == 0) {
#pragma unroll
                for (int k = 0; k < COLUMNS / 16; k++)
#pragma unroll
                    for (int p = 0; p < PAIRS; p++)
                        load_columns(right[k][p], ups + block % 2 * UP_BYTES + low_at(16 * k + own_row, 2 * p + own_piece));
            }
            u32 from = tiles + n % STAGES * TILE_BYTES;
#pragma unroll
            for (int k = 0; k < COLUMNS / 16; k++) {
                u32 left[4];
                load_rows(left, from + tile_at(16 * warp + own_row, 2 * k + own_piece));
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    multiply(low_sums[tile][2 * p], left, right[k][p][0], right[k][p][1]);
                    multiply(low_sums[tile][2 * p + 1], left, right[k][p][2], right[k][p][3]);
                }
            }
#pragma unroll
            for (int k = 0; k < TOKENS / 32; k++) {
                int token = tokens_of_warp + 16 * k;
                u32 left[4];
                load_columns(left, from + tile_at(token + turned_row, 2 * columns_of_warp + turned));
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    u32 factor[4];
                    load_columns(factor, lows + low_at(tile * TOKENS + token + own_row, 2 * p + own_piece));
                    multiply(up_sums[2 * p], left, factor[0], factor[1]);
                    multiply(up_sums[2 * p + 1], left, factor[2], factor[3]);
                }
            }
        }
        // the warps that have the other half of the tokens leave theirs to those of the first
        if (tokens_of_warp) {
#pragma unroll
            for (int j = 0; j < R / 8; j++) {
                int at = (16 * columns_of_warp + lane / 4) * R + 8 * j + lane % 4 * 2;
                halves[at] = up_sums[j][0], halves[at + 1] = up_sums[j][1];
                halves[at + 8 * R] = up_sums[j][2], halves[at + 8 * R + 1] = up_sums[j][3];
            }
        }
        __syncthreads();
        if (tokens_of_warp) continue;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = 16 * columns_of_warp + 8 * i + lane / 4, column = first_column + block * COLUMNS + row;
            if (column >= columns) continue;
            float* to = up_parts + (static_cast<i64>(group) * columns + column) * R;
#pragma unroll
            for (int j = 0; j < R / 8; j++) {
                int at = 8 * j + lane % 4 * 2;
                to[at] = up_sums[j][2 * i] + halves[row * R + at];
                to[at + 1] = up_sums[j][2 * i + 1] + halves[row * R + at + 1];
            }
        }
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int token = first_token + tile * TOKENS + 16 * warp + 8 * i + lane / 4;
            if (token >= rows) continue;
            float* to = low_parts + (static_cast<i64>(side) * rows + token) * R;
#pragma unroll
            for (int j = 0; j < R / 8; j++) {
                int at = 8 * j + lane % 4 * 2;
                to[at] = low_sums[tile][j][2 * i], to[at + 1] = low_sums[tile][j][2 * i + 1];
            }
        }
}

// sum (4) <- alpha * the sum of `parts` of 4 numbers each, `size` numbers apart
__device__ __forceinline__ void sum_of(float (&sum)[4], const float* parts, i64 size, int count, float alpha) {
#pragma unroll 4
    for (int part = 0; part < count; part++) {
        float v[4];
        load(parts + part * size, v);
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += v[j];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] *= alpha;
}

// d_low (M,R), d_up (N,R) <- alpha times the sums of their parts; a thread has 4 numbers
extern "C" __global__ void __launch_bounds__(THREADS)
    low_rank_sums(bf16* d_low, G* d_up, const float* low_parts, const float* up_parts, i64 low_pitch, int rows, int columns,
                  int across, int groups, float alpha, int add) {
    i64 at = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * 4, low_size = static_cast<i64>(rows) * R;
    float sum[4] = {};
    if (at < low_size) {
        sum_of(sum, low_parts + at, low_size, across, alpha);
        store(d_low + at / R * low_pitch + at % R, sum);
        return;
    }
    at -= low_size;
    i64 up_size = static_cast<i64>(columns) * R;
    if (at >= up_size) return;
    sum_of(sum, up_parts + at, up_size, groups, alpha);
    if (add) {
        float before[4];
        load(d_up + at, before);
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += before[j];
    }
    store(d_up + at, sum);
}
