// Bytes of x (rows, C) transposed: out (C, rows). Columns in fp8 of what exists as rows in fp8, whose scale they share;
// scales of tiles are transposed with them, and what pads the last four is 1.
//
// A block owns a tile of 128 rows and 128 columns in shared memory, where each group of 16 rows begins 4 words further on:
// 8 groups by 4 words are 32 banks, so that a warp reads 16 rows of 4 columns without a conflict, and what it writes are
// four runs of 128 bytes. Where rows or columns are no multiple of 16, bytes go one by one.
//
// Architectures: 80 86 89 90 100 120
// Constants: C (columns), VECTOR (1: rows and columns are multiples of 16)

#include "common.cuh"
#include "constants"

constexpr int TILE = 128, GROUPS = TILE / 16, THREADS = 256;
constexpr int PITCH = TILE, GROUP_BYTES = 16 * PITCH + 16;

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose(u8* out, const u8* x, float* turned_scale, const float* scale, i64 rows) {
    constexpr int ACROSS = (C + TILE - 1) / TILE;
    if (scale && threadIdx.x < 4) {  // the last tile of a column pads up to three more
        int down = blockIdx.x / ACROSS, across = blockIdx.x % ACROSS, tiles = gridDim.x / ACROSS, at = down + threadIdx.x;
        int pitch = (tiles + 3) / 4 * 4;
        if (threadIdx.x == 0) turned_scale[across * pitch + at] = scale[down * ((ACROSS + 3) / 4 * 4) + across];
        else if (down == tiles - 1 && at < pitch) turned_scale[across * pitch + at] = 1;
    }
    __shared__ __align__(16) u8 tile[GROUPS * GROUP_BYTES];
    int first_column = blockIdx.x % ACROSS * TILE;
    i64 first_row = static_cast<i64>(blockIdx.x / ACROSS) * TILE;
    if constexpr (VECTOR) {
        Words<4> read[TILE * TILE / 16 / THREADS];
#pragma unroll
        for (int i = 0; i < TILE * TILE / 16 / THREADS; i++) {
            int task = i * THREADS + threadIdx.x, row = task / GROUPS, column = task % GROUPS * 16;
            if (first_row + row < rows && first_column + column < C)
                read[i] = *reinterpret_cast<const Words<4>*>(x + (first_row + row) * C + first_column + column);
        }
#pragma unroll
        for (int i = 0; i < TILE * TILE / 16 / THREADS; i++) {
            int task = i * THREADS + threadIdx.x, row = task / GROUPS, column = task % GROUPS * 16;
            *reinterpret_cast<Words<4>*>(tile + row / 16 * GROUP_BYTES + row % 16 * PITCH + column) = read[i];
        }
        __syncthreads();
        int group = threadIdx.x % GROUPS, column = threadIdx.x / GROUPS * 4;
        if (first_row + group * 16 >= rows || first_column + column >= C) return;
        u32 turned[4][4];  // [column][4 rows each]
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* from = tile + group * GROUP_BYTES + 4 * i * PITCH + column;
            u32 r0 = *reinterpret_cast<const u32*>(from), r1 = *reinterpret_cast<const u32*>(from + PITCH);
            u32 r2 = *reinterpret_cast<const u32*>(from + 2 * PITCH), r3 = *reinterpret_cast<const u32*>(from + 3 * PITCH);
            u32 low01 = __byte_perm(r0, r1, 0x5140), low23 = __byte_perm(r2, r3, 0x5140);
            u32 high01 = __byte_perm(r0, r1, 0x7362), high23 = __byte_perm(r2, r3, 0x7362);
            turned[0][i] = __byte_perm(low01, low23, 0x5410);
            turned[1][i] = __byte_perm(low01, low23, 0x7632);
            turned[2][i] = __byte_perm(high01, high23, 0x5410);
            turned[3][i] = __byte_perm(high01, high23, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            *reinterpret_cast<Words<4>*>(out + (first_column + column + j) * rows + first_row + group * 16) =
                Words<4>{turned[j][0], turned[j][1], turned[j][2], turned[j][3]};
    } else {
        for (int task = threadIdx.x; task < TILE * TILE; task += THREADS) {
            i64 row = first_row + task / TILE;
            int column = first_column + task % TILE;
            if (row < rows && column < C) tile[task / TILE / 16 * GROUP_BYTES + task / TILE % 16 * PITCH + task % TILE] = x[row * C + column];
        }
        __syncthreads();
        for (int task = threadIdx.x; task < TILE * TILE; task += THREADS) {
            int in_tile = task % TILE, column = first_column + task / TILE;
            if (first_row + in_tile < rows && column < C)
                out[column * rows + first_row + in_tile] = tile[in_tile / 16 * GROUP_BYTES + in_tile % 16 * PITCH + task / TILE];
        }
    }
}
