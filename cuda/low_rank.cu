// Both gradients that an adapter y += s B a takes from d_y, which is read once: d_a (M,R) = s d_y B, d_B (N,R) = s d_y^T a.
//
// A block owns TILES * 64 tokens and some of the blocks of 128 columns. It holds the sums of its tokens over all its columns
// in registers, and those of a block of columns over its tokens, and leaves both as parts, which `low_rank_sums` adds up in
// order. Tiles of d_y (64 tokens, 128 columns) come through shared memory, STAGES of them under way; tensor cores multiply.
// Of a tile a warp takes 16 tokens and half of the columns for d_a, and 16 columns and all tokens for d_B.
//
// Architectures: 80 86 89 90 100 120
// Constants: G (dtype of d_B), R (16 or 32), TILES, STAGES, BLOCKS (to a multiprocessor, at least)

#include "common.cuh"
#include "constants"
#include "low_rank.cuh"

constexpr int THREADS = 256, TOKENS = 64, COLUMNS = 128;
constexpr int TILE_BYTES = 2 * TOKENS * COLUMNS, LOW_BYTES = 2 * TILES * TOKENS * R, UP_BYTES = 2 * COLUMNS * R;

// low_parts (across,M,R), up_parts (groups of tokens,N,R) <- d_y (M,N), low (M,R), up (N,R). Blocks go by columns first.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    low_rank_backward(float* low_parts, float* up_parts, const bf16* d_y, const bf16* low, const bf16* up, i64 pitch,
                      i64 low_pitch, int rows, int columns, int across, int per_block) {
    extern __shared__ __align__(128) u8 memory[];
    u32 tiles = static_cast<u32>(__cvta_generic_to_shared(memory)), lows = tiles + STAGES * TILE_BYTES;
    u32 ups = lows + LOW_BYTES;
    int side = blockIdx.x % across, group = blockIdx.x / across, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first_token = group * TILES * TOKENS, first_column = side * per_block * COLUMNS;
    int count = min(per_block, (columns - first_column + COLUMNS - 1) / COLUMNS);
    auto begin_reading = [&](int n) {
        if (n < count * TILES) {
            int token = first_token + n % TILES * TOKENS, column = first_column + n / TILES * COLUMNS;
            u32 to = tiles + n % STAGES * TILE_BYTES;
            int row = threadIdx.x / (COLUMNS / 8), piece = threadIdx.x % (COLUMNS / 8), left = rows - token - row;
            const bf16* from = d_y + (token + row) * pitch + column + piece * 8;
            if (column + piece * 8 >= columns) left = 0;
#pragma unroll
            for (int i = 0; i < TOKENS; i += THREADS * 8 / COLUMNS)
                copy(to + piece_at<COLUMNS>(row, piece) + i * 2 * COLUMNS, i < left ? from + i * pitch : d_y, i < left);
            if (n % TILES == 0) {
                for (int i = threadIdx.x; i < UP_BYTES / 16; i += THREADS) {
                    int row = i / (R / 8), piece = i % (R / 8);
                    bool there = column + row < columns;
                    copy(ups + n / TILES % 2 * UP_BYTES + low_at(row, piece), there ? up + (column + row) * R + piece * 8 : up,
                         there);
                }
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
    int tokens_of_warp = warp % 4 * 16, half = warp / 4;
    u32 own_tile = piece_at<COLUMNS>(tokens_of_warp + own_row, half * COLUMNS / 16 + own_piece), turned_tile = piece_at<COLUMNS>(turned_row, 2 * warp + turned);
    u32 own_up = ups + low_at(half * COLUMNS / 2 + own_row, own_piece), own_low = lows + low_at(own_row, own_piece);
    float low_sums[TILES][R / 8][4] = {};
#pragma unroll 1
    for (int block = 0; block < count; block++) {
        float up_sums[R / 8][4] = {};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            int n = block * TILES + tile;
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();
            begin_reading(n + STAGES - 1);
            u32 from = tiles + n % STAGES * TILE_BYTES, up_from = own_up + block % 2 * UP_BYTES;
#pragma unroll
            for (int k = 0; k < COLUMNS / 32; k++) {
                u32 left[4];
                load_rows(left, from + (own_tile ^ 32 * k));
                add_product(low_sums[tile], left, up_from, 16 * k);
            }
#pragma unroll
            for (int k = 0; k < TOKENS / 16; k++) {
                u32 left[4];
                load_columns(left, from + turned_tile + 32 * COLUMNS * k);
                add_product(up_sums, left, own_low, tile * TOKENS + 16 * k);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int column = first_column + block * COLUMNS + 16 * warp + 8 * i + lane / 4;
            if (column >= columns) continue;
            float* to = up_parts + (static_cast<i64>(group) * columns + column) * R + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < R / 8; j++) store_two(to + 8 * j, up_sums[j][2 * i], up_sums[j][2 * i + 1]);
        }
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
    __syncthreads();
    // the warps that had the second half of the columns leave their sums to those of the first
    float* others = reinterpret_cast<float*>(memory) + (tokens_of_warp + lane / 4) * R + lane % 4 * 2;
    static_assert(4 * TILES * TOKENS * R <= STAGES * TILE_BYTES + LOW_BYTES, "the other half of the sums takes their place");
    int token = first_token + tokens_of_warp + lane / 4;
    float* to = low_parts + (static_cast<i64>(side) * rows + token) * R + lane % 4 * 2;
#pragma unroll
    for (int turn = 1; turn >= 0; turn--) {
        if (half == turn) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < R / 8; j++) {
                        int row = tile * TOKENS + 8 * i, at = row * R + 8 * j;
                        float* there = others + at;
                        const float(&sums)[4] = low_sums[tile][j];
                        if (turn) store_two(there, sums[2 * i], sums[2 * i + 1]);
                        if (!turn && token + row < rows) store_two(to + at, sums[2 * i] + there[0], sums[2 * i + 1] + there[1]);
                    }
        }
        __syncthreads();
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
